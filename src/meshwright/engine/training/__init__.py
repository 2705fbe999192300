"""Training: the loop, the data, microbatches, and checkpoints of a run.

train                 `train`: steps, evaluations, checkpoints, and the end of a run
training_events       report the events of a run as JSON lines, curves and a progress bar
log_file              write the events of a run to a file, by a thread
background_saves      write the checkpoints of a run in the background, and report failures once
stop_signals          note SIGTERM, so that a run can save and end
equal_options         compare the options of ranks before the first step
clip_grad_norm        clip gradients by their total norm, also across meshes
microbatches          `microbatched`: eager pipeline steps over microbatches, by a schedule
buffer_copies         copies of buffers for backward passes that run after later forward passes
data_loader           `shard_dataloader`: distribute the batches of a data loader over meshes
sampler               `GlobalSampler`: choose the samples of a step by global index
state_checkpoint      save and load nested dicts of tensors and Python values
training_checkpoint   save and resume a run: model, optimizer, schedule, data, random states
restored_objects      load saved states into Python objects, all of them or none
random_states         save and restore the states of random generators
"""
