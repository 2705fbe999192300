"""Plans for a captured module: its mesh, the layouts of its tensors, and its pipeline.

mesh_search         `plan_mesh`: the fastest plans for each number of ranks that share a replica
replicas            the best shardings and memory-saving options for one number of replicas
pipeline_search     search for stages, schedule and microbatches of a chain of layers
pipeline_plan       `Pipelining`: split points, schedule and microbatches as data
module_assumptions  assumptions of the prices of such plans
mesh_plan           `MeshPlan`: a plan for a module, with its text and its account
mesh_plan_parser    read and check a mesh plan that a person wrote
memory_curve        bytes of a rank over the time of a step
program_account     account of a program: its communications, phases and live bytes
"""
