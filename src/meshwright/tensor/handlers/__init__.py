"""Functions and attributes of torch that are handled without a plan.

torch_hooks           private names of torch: torch.compile, guarded operators, torch.distributed
direct_attributes     attributes and methods that the class answers without interception
tensor_attributes     attributes, devices, `.data` and in-place reshaping; also batch norm's statistics
memory_access         addresses, storages, NumPy arrays and DLPack capsules of whole tensors
list_arguments        tensors to broadcast together, and lists of integers as indices
out_targets           calls with `out=`: compute the results, then write them into the given tensors
counter_draws         counter-based random numbers (Philox 4x32-10) for any part of a tensor
random_draws          random_source: draws with the same global numbers for every layout
random_functions      handlers of initializers, dropout and attention with dropout
tensor_constructors   C++ functions that read elements without interception, such as torch.tensor(x)
sparse_constructors   sparse and nested tensors made from distributed ones: whole and plain
torch_distributed     functions of torch.distributed that are called on distributed tensors
padded_encoder        nn.TransformerEncoder with padded sequences
torch_compile         torch.compile runs functions with distributed tensors uncompiled
"""
