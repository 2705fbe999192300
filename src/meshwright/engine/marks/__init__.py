"""Functions that a model calls to distribute its tensors and modules over a mesh.

default_mesh       set, get and create the default mesh; check that the ranks of a mesh exist
tensors            `shard_tensor`, `reshard`, and others that create, move and collect tensors
layers             `shard_layer`: distribute the parameters and buffers of a whole module
module_memory      keep memory that tensors of a module share when the module is distributed
stale_parameters   refuse steps of optimizers that hold parameters from before distribution
materialize        allocate and initialise a model that was built on the meta device
context_parallel   select the attention algorithm for a sharded sequence
document_attention  `document_attention`: attention in packed sequences
local_map          run functions and modules on one rank's local parts
local_call         the operator that a captured program has for a call of a `local_map` function
experts            `dispatch_experts`: mixture of experts on one device or on a mesh
experts_rows       sort rows by expert, call the experts' function, and combine its results
experts_exchange   send rows by all-to-all to the ranks that hold their experts, and back
experts_slots      experts with a capacity in static programs: slots of fixed size
torch_dtensor      convert to torch's DTensor and back, without a copy
decision_record    collect the layout decisions of this rank for `explain`
"""
