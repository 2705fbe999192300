"""Checkpoints of quantized models: forms of several libraries, loaded and saved by each rank's slices.

file_tensor               the interface of a form: tensors in the files, checks, conversion
compressed_tensors_form   the form of compressed-tensors, which layers hold in memory
experts_form              quantized experts, which only this package reads
gptq_form                 the form of AutoGPTQ and GPTQModel
awq_form                  the form of AutoAWQ
bitsandbytes_form         the form of bitsandbytes, nf4
save                      save in the form of compressed-tensors
load                      load from any form
"""
