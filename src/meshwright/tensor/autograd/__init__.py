"""Gradients, hooks and graph nodes of the whole tensor, over autograd on local parts.

torch_hooks          private names of torch: functions of users, dual tensors and backward passes
intercepted_call     arguments of an intercepted call by place or name
dual_gradient        local gradients as distributed tensors in the dual layout
graph_node           GraphNode: a node of the autograd graph that answers for the whole tensor or refuses
assigned_gradients   gradients assigned by `p.grad = g`, to which backward passes add
user_functions       users' autograd functions, whose forward and backward passes see whole tensors
backward_handlers    handlers of backward passes, `.grad` and hooks on gradients
forward_mode         handlers of forward-mode derivatives: a tangent has the layout of its tensor
"""
