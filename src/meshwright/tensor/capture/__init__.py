"""Facts about a call that follow without its values.

call_capture     capture: the ATen operators that a call makes on its global arguments, before autograd
kernel_orders    strides of results of operators whose kernels differ from torch's meta kernels
trial_calls      trial calls for dtypes of results, missing kernels, and reasons of failed captures
gradient_paths   operands for which each result of a call has a gradient
metadata_check   error for a result of a meta tensor that concerns addresses, storages or devices
"""
