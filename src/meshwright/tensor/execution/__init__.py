"""Execution of calls: from an intercepted function to its results.

torch_hooks         private names of torch: function transforms and TorchScript
dispatch            dispatch: find or make the plan of a call, and run it
call_planning       make_plan: plan a call by its operators, or as a call on whole tensors
captured_call       calls with the operators that they consist of, and the plans of these operators
native_kernel       C++ kernels, compiled at their first use
row_kernel          the kernel of products of few rows
few_row_products    products of few rows, by that kernel or by torch
run_plan            CallPlan: plans of calls, which run on local tensors
reduced_operands    linear operators on pending sums that another call has reduced
foreach_functions   torch._foreach_*: one local call, or one call for each entry
outside_mesh        a call on a rank outside the mesh: specs of its results, without elements
func_transforms     distributed tensors inside vmap, grad, jvp and other transforms of torch.func
"""
