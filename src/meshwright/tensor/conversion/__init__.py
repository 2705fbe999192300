"""Conversion between layouts, and between distributed and plain tensors.

torch_hooks         private names of torch: the hooks of torch.utils.checkpoint
convert             Move: a differentiable conversion of a local part from one layout to another
checkpointed_moves  values from other pipeline stages, kept for the second run of a checkpointed call
saved_operands      converted operands that autograd saves, kept up to date with writes to their sources
gradient_buckets    buckets of gradients that one all-reduce adds up
early_buckets       EarlyBuckets: buckets whose reductions start during a backward pass, on devices with streams
pending_gradients   gradients that are pending sums, stored separately and reduced in buckets
joint_plan          packing of the parts of several tensors into one buffer
joint_gather        JointGather: parameters that one call gathers, and whose gradients one call reduces
local_parts         conversion, gathering and write-back of the local parts of a call
python_values       Python values and whole values of tensors, equal on every rank of the world
whole_call          call of any function on whole tensors, with write-back of changed arguments
same_parts          check on simulated ranks that `from_local` gets parts of one tensor
distribute          distribute, from_local, redistribute, full_tensor, and the marks of captured programs
stage_order         StageOrder: operands from several pipeline stages are sent to the latest stage
"""
