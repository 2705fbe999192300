"""Quantized layers, and the layers of a model that become such.

quantized_linear    QuantizedLinear: the layer
quantized_experts   QuantizedExperts: experts in one parameter, which computes its numbers when it is read
linear_layers       the layers that a scheme quantizes, and their conversion
"""
