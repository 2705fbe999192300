"""The commands of `meshwright`, one module for each, and the function that runs them.

main                `main`: parse a command line, run the command, and return its exit code
train               train on a mesh of ranks, and compare with one device
training_progress   progress bar of a training run, and a table of two losses
run                 run a script on several ranks, simulated or as processes
plan                `plan` finds the best plan for a cluster; `predict` predicts a given plan
plan_phases         plans of two phases, for `plan --phases train,generate`
explain             costs of a training step and their reasons
parallelize         suggest a plan by module names for a model
quantize            quantize a language model
profile             measure this machine, and write a cluster file
profile_products    measure the products of quantized layers
schedule            check and draw a pipeline schedule
checkpoint          inspect, verify, compare or convert checkpoints
doctor              check this machine for missing parts
doctor_devices      findings about devices: driver, links, the latest conformance
conformance         check a device
"""
