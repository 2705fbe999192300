"""Views with their own memory, and tensors that share memory.

view_origin       ViewOrigin: the call that made a view, and the elements of its base
lost_history      error for gradients of views that were made before their base got a history
dist_view         DistView: a view that is gathered, read again after writes to its base, and written back
view_checks       check_writable: errors for writes to views
view_history      autograd history of a view with its own memory, as one device reports it
shared_data       memory that a tensor takes over by `x.data = new`
gathered_memory   memory of the whole tensor, for callers that request an address or a storage
memory_overlap    shared_memory: groups of tensors with the same elements, and partial overlaps
write_overlap     error for a write to elements that another operand has at other places
"""
