"""The distributed tensor class, and the state that all other modules read.

dist_tensor           DistTensor: a local tensor with a spec; the signatures and the cache of plans
absent_tensor         Absent: a distributed tensor on a rank outside its mesh
write_counts          number of writes to a memory, including writes that no version counter shows
shared_elements       test whether two local tensors share an element of memory
tree                  leaves of nested lists, tuples, mappings and slices, and functions that map them
function_names        names of functions as users know them
handler_registry      registry of the handlers of functions that need no plan
rank_setting          PerRank: a setting in a context, separate for each rank
capture_marks         specs and marks of whole tensors in a captured model, and the recording of parts
rank_ownership        error if a simulated rank uses a tensor that another simulated rank made
environment_hash      checksums of versions, settings, random states and tensors, equal on all ranks
initial_checksum      checksum of the whole tensor that a part was taken from, valid until the first write
computation_numbers   numbers of the calls that made a tensor, equal on all ranks that run one program
other_libraries       refusal of tensors and operators of torchao
call_sites            user lines of conversions, to attribute the communication of their gradients
"""
