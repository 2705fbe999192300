"""Parallel models, optimizers and ZeRO in the eager mode, without a recorded program.

parallelize          make a model parallel by a plan: styles by module name, stages, ZeRO
styles               the styles of parallel modules, such as `ColwiseParallel`
same_inputs          check that the plain inputs of a model are equal on all ranks
split_pipeline       put the layers of a model on pipeline stages, at named modules or by cost
example_run          the forward pass of an example: costs and order of modules, and places of tensors
stage_entry          move the arguments of a layer to the stage of the layer
optimizer            `shard_optimizer`: optimizers over distributed parameters, and layouts of states
master_weights       float32 copies of parameters, and optimizer states in the memory of the host
local_step           run an optimizer's step on local parts if that gives equal numbers
zero                 ZeRO stages 1 to 3: shard states, gradients and parameters
swapped_parameters   give parameters another layout while their module runs
regather             save local parts for the backward pass, and gather them again when needed
gather_order         the order of the uses of units, and the units that stay whole or are gathered ahead
parameter_unit       modules whose parameters are gathered together
unit_choice          the units of a model: its blocks, or modules that are named
"""
