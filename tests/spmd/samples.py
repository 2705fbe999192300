"""Sample calls of every operator that has a rule, one line each: `operator: arguments`.

`x` is normal, `f` the same in single precision, `p` is between 0.1 and 0.9, `i(n, ...)` are integers below n, `b` is
true or false, `c` complex, `ends(...)` are the ends of groups.
Sizes of 4 and 5 make uneven and empty pieces on three ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.spmd.rules import linalg as linalg
from meshwright.spmd.rules import pointwise as pointwise

from .walker import Sample

DOMAIN = {"acosh": "1 + p(4, 5)", "arccosh": "1 + p(4, 5)", "mvlgamma": "3 + p(4, 5), 2", "polygamma": "1, p(4, 5)"}
DOMAIN |= {
    "special_multigammaln": "3 + p(4, 5), 2",
    "special_polygamma": "1, p(4, 5)",
    "threshold": "x(4, 5), 0.1, 2.0",
}
DOMAIN |= {"full_like": "x(4, 5), 3.0", "bitwise_not": "i(5, 4, 5)", "_conj": "c(4, 5)"}
DOMAIN |= dict.fromkeys(["real", "imag", "view_as_real"], "c(4, 5)")
INTEGERS = "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm __and__ __or__ __xor__"
INTEGERS += " __lshift__ __rshift__ __iand__ __ior__ __ixor__"
CONSTANT = """copy detach_copy lift_fresh lift floor_divide heaviside igamma igammac special_gammainc special_gammaincc
    special_zeta linalg_eig _safe_softmax histc
    _weight_int8pack_mm _weight_int4pack_mm_for_cpu _scaled_mm
    hardsigmoid_backward logit_backward mish_backward silu_backward""".split()
"""Operators without a derivative in torch."""
FIXED = {
    "cross_entropy_loss": (2,),
    "nll_loss": (2,),
    "nll_loss_nd": (2,),
    "nll_loss2d": (2,),
    "soft_margin_loss": (1,),
    "linalg_pinv": (1, 2),
    "fractional_max_pool2d": (1,),
    "fractional_max_pool3d": (1,),
}
FIXED |= {"batch_norm": (3, 4), "fake_quantize_per_tensor_affine": (1, 2), "fake_quantize_per_channel_affine": (1, 2)}
FIXED |= {"binary_cross_entropy": (2,), "binary_cross_entropy_with_logits": (2, 3)}
"""Operands without a derivative in torch."""
POLYNOMIALS = ("special_chebyshev", "special_hermite", "special_laguerre", "special_legendre", "special_shifted")

TABLE = """
add.Tensor: x(4, 5), x(5), alpha=2
add.Tensor: x(4, 1), x(3, 1, 5)
add.Tensor: x(4, 5), x()
add.Scalar: x(4, 5), 2
add.Scalar: x(4, 5), 0
add.Tensor: i(9, 4), i(9, 4)
sub.Tensor: x(4, 5), x(4, 1)
subtract.Tensor: x(4), x(4)
rsub.Tensor: x(4), x(4)
rsub.Scalar: x(4), 2
complex: x(4, 5), x(4, 5)
mul.Tensor: x(4, 5), x(5)
mul.Scalar: x(4, 5), 3
multiply.Tensor: x(4, 5), x(4, 5)
div.Tensor: x(4, 5), p(5)
div.Scalar: x(4, 5), 3
div.Tensor_mode: x(4, 5), p(5), rounding_mode="floor"
div.Tensor_mode: x(4, 5), p(5), rounding_mode=None
divide.Tensor: x(4, 5), p(4, 1)
true_divide.Tensor: x(4, 5), p(4, 1)
clamp: x(4, 5), -0.5, 0.5
clamp: x(4, 5), max=0.5
clamp.Tensor: x(4, 5), x(5), 2 + p(4, 1)
clamp.Tensor: x(4, 5), max=x(5)
clip: x(4, 5), 0.1
clamp_min: x(4, 5), 0.1
clamp_min.Tensor: x(4, 5), x(4, 5)
clamp_max: x(4, 5), 0.1
to.dtype: x(4, 5), torch.float32
zeros_like: x(4, 5)
zeros_like: x(4, 5), dtype=torch.bool
mean: x(4, 5), dtype=torch.float32
mean.dim: f(4, 5), 1, True, dtype=torch.float64
prod.dim_int: i(9, 4, 5), 0, dtype=torch.uint8
sum: i(2, 4, 5), dtype=torch.bool
to.dtype: x(4, 5), torch.int32
to.dtype: i(4, 5), torch.float64
to.dtype: b(4, 5), torch.float64
to.device: x(4, 5), torch.device("cpu"), torch.float32
type_as: x(4, 5), x(2).float()
_to_copy: x(4, 5), dtype=torch.complex128
where.self: b(4, 5), x(5), x(4, 1)
where.ScalarOther: b(4, 5), x(5), 2.0
where.ScalarOther: b(4, 5), x(5), 0.0
where.ScalarSelf: b(4, 5), 1.0, x(5)
masked_fill.Scalar: x(4, 5), b(5), 0
masked_fill.Scalar: x(4, 5), b(4, 1), 1.5
masked_fill.Tensor: x(4, 5), b(4, 5), x()
prelu: x(4, 5), x(5)
prelu: x(4, 5), x(1)
prelu: x(4, 5, 3), x(5)
prelu: x(4), x(1)
_prelu_kernel: x(4, 5), x(1, 5)
addcmul: x(5), x(4, 5), x(4, 1), value=2
addcdiv: x(5), x(4, 5), p(4, 1), value=2
lerp.Scalar: x(4, 5), x(5), 0.3
lerp.Tensor: x(4, 5), x(5), p(4, 1)
copy: x(4, 5), x(5)
frexp.Tensor: x(4, 5)
bucketize.Tensor: p(4, 5), torch.tensor([0.2, 0.5])
view_as_complex: x(4, 5, 2)
linear: x(4, 3, 5), x(6, 5), x(6)
linear: x(5), x(6, 5)
linear: x(4, 5), x(5)
matmul: x(4, 5), x(5, 6)
matmul: x(5), x(5)
matmul: x(5), x(5, 4)
matmul: x(3, 4, 5), x(5)
matmul: x(5), x(3, 5, 4)
matmul: x(2, 1, 4, 5), x(3, 5, 6)
linalg_matmul: x(4, 5), x(5, 6)
mm: x(4, 5), x(5, 6)
bmm: x(3, 4, 5), x(3, 5, 6)
mv: x(4, 5), x(5)
dot: x(5), x(5)
vdot: x(5), x(5)
outer: x(4), x(5)
ger: x(4), x(5)
addmm: x(6), x(4, 5), x(5, 6), beta=2, alpha=3
addmm: x(4, 1), x(4, 5), x(5, 6)
addbmm: x(4, 6), x(3, 4, 5), x(3, 5, 6)
baddbmm: x(3, 4, 6), x(3, 4, 5), x(3, 5, 6)
addmv: x(4), x(4, 5), x(5)
addr: x(4, 5), x(4), x(5)
einsum: "bij,bjk->bik", [x(3, 4, 5), x(3, 5, 6)]
einsum: "i,i", [x(5), x(5)]
einsum: "bqhd,bkhd->bhqk", [x(2, 4, 3, 5), x(2, 5, 3, 5)]
einsum: "...ij,...jk->...ik", [x(3, 4, 5), x(5, 6)]
einsum: "ij->", [x(4, 5)]
einsum: "Ii,iJ,J->IJ", [x(4, 5), x(5, 3), x(3)]
linalg_cross: x(4, 3), x(4, 3)
_int_mm: i8(4, 5), i8(5, 6)
_grouped_mm: f(7, 8), f(5, 8, 12), ends(2, 2, 3, 6, 7)
_grouped_mm: f(7, 8), f(2, 12, 8).mT, offs=ends(3, 7)
_grouped_mm: f(5, 8, 4), f(12, 4).mT, ends(0, 3, 3, 9, 12)
_grouped_mm: f(12, 8).mT, f(12, 4), ends(2, 2, 12)
_grouped_mm: f(5, 4, 8), f(5, 8, 12)
histc: x(4, 5), 3, -1.0, 1.0
histc: f(5), bins=4, max=3
view: x(4, 6), [2, 2, 6]
view: x(4, 6), [24]
view: x(4, 6), [6, 4]
view: x(4, 6), [-1, 3, 2]
view: x(5, 6), [5, 6]
view: x(0, 6), [0, 3, 2]
view: x(1, 5, 1), [5, 1, 1, 1]
view: x(2, 3, 4), [6, 4]
view: x(), [1]
reshape: x(2, 5, 4), [10, 4]
reshape: x(10, 4), [2, 5, 2, -1]
_unsafe_view: x(12, 4), [3, 4, 4]
view_copy: x(12, 4), [3, 4, 4]
flatten.using_ints: x(3, 4, 5), 1
flatten.using_ints: x(3, 4, 5), 0, -2
flatten.using_ints: x()
ravel: x(4, 5)
unflatten.int: x(4, 10), -1, [2, 5]
unflatten.int: x(8, 3), 0, [-1, 4]
permute: x(3, 4, 5), [2, 0, 1]
permute: x(3, 4, 5), [-1, 0, 1]
permute_copy: x(3, 4, 5), [2, 0, 1]
transpose.int: x(3, 4, 5), 0, -1
swapaxes: x(3, 4), 0, 1
swapdims: x(3, 4), 0, 1
mT: x(3, 4, 5)
mH: c(4, 5)
adjoint: c(4, 5)
t: x(4, 5)
t: x(5)
numpy_T: x(3, 4, 5)
matrix_H: c(4, 5)
movedim.int: x(3, 4, 5), 0, -1
movedim.intlist: x(3, 4, 5), [0, 1], [1, 2]
moveaxis.int: x(3, 4, 5), 2, 0
unsqueeze: x(4, 5), -1
unsqueeze: x(4, 5), 1
squeeze: x(4, 1, 5)
squeeze.dim: x(4, 1, 5), 1
squeeze.dim: x(4, 5), 1
squeeze.dims: x(1, 4, 1), [0, 2]
expand: x(1, 5), [4, 5]
expand: x(4, 1), [3, -1, 5]
expand: x(), [4]
repeat: x(4, 5), [2, 3, 1]
repeat: x(5), [3]
tile: x(4, 5), [3]
repeat: x(4, 1), [1, 2]
tile: x(5), [1]
repeat_interleave.self_int: x(4, 5), 3, 1
repeat_interleave.self_int: x(5), 2
repeat_interleave.self_int: x(5), 1
repeat_interleave.self_int: x(5, 4), 2, -1
slice.Tensor: x(4, 5), 1, 1, 3
slice.Tensor: x(4, 5), 0, 0, 9223372036854775807
slice.Tensor: x(4, 5), -1, -2
narrow: x(4, 5), 1, 1, 3
select.int: x(4, 5), -1, 2
unbind.int: x(3, 4), 0
split.Tensor: x(4, 6), 3, 1
split.Tensor: x(4, 5), 2, 1
split.sizes: x(4, 5), [2, 3], -1
split_with_sizes: x(4, 6), [3, 3], -1
unsafe_split.Tensor: x(4, 6), 2, 1
unsafe_split_with_sizes: x(4, 6), [4, 2], 1
chunk: x(4, 6), 3, 1
chunk: x(5, 4), 2
chunk: x(4, 6), 1, 1
unsafe_chunk: x(4, 6), 2, 1
cat: [x(4, 5), x(2, 5)]
cat: [x(4, 5), x(4, 3), x(4, 1)], -1
cat: [x(0), x(4, 3)], 1
concat: [x(4, 5), x(2, 5)]
concatenate: [x(4, 5), x(2, 5)]
stack: [x(4, 5), x(4, 5)], 1
stack: [x(4, 5), x(4, 5)], -1
flip: x(4, 5), [0]
roll: x(4, 5), [1], [1]
roll: x(4, 5), [3]
tril: x(3, 4, 5)
triu: x(3, 4, 5), 1
diagonal: x(3, 4, 5), 1, 0, -1
diag_embed: x(4, 5)
diag_embed: x(4, 5), 1, 0, 2
unfold: x(4, 5), 1, 2, 1
sum: x(4, 5)
sum: b(4, 5)
sum: x(4, 5), dtype=torch.int64
sum.dim_IntList: x(3, 4, 5), [0, -1]
sum.dim_IntList: x(3, 4, 5), [1], True
sum.dim_IntList: x(), [0]
nansum: x(4, 5)
nansum: x(4, 5), [1], True
count_nonzero.dim_IntList: i(2, 4, 5), [1]
count_nonzero: i(2, 4, 5)
mean: x(4, 5)
mean.dim: x(3, 4, 5), [1], True
mean.dim: x(3, 4, 5), [0, 2]
amax: x(4, 5), [1]
amax: same(4, 5), [0, 1]
amax: same(4, 5), [0], True
amax: i(9, 4, 5), [0]
amin: same(4, 5), [1]
prod: x(4, 5)
prod.dim_int: x(4, 5), 1, True
prod.dim_int: i(3, 4, 5), 0
logsumexp: x(4, 5), [0]
logsumexp: x(4, 5), [0, 1], True
linalg_vector_norm: x(4, 5)
linalg_vector_norm: x(4, 5), 3, [1], True
linalg_vector_norm: same(4, 5), float("inf"), [0]
linalg_vector_norm: same(4, 5), float("-inf"), [0]
linalg_vector_norm: same(4, 5), 0, [0]
linalg_vector_norm: c(4, 5), 2, [0]
linalg_vector_norm: 0 * x(4, 5), 2, [0]
norm.ScalarOpt_dim: x(4, 5), None, [1]
norm.ScalarOpt_dim: x(4, 5), 3, [0], True
linalg_vector_norm: x(4, 5), 1
norm.Scalar: x(4, 5)
norm.ScalarOpt_dim: x(4, 5), 1, [1]
norm.ScalarOpt_dim: x(4, 5), None, [0], True
var: x(4, 5)
var: x(4, 5), False
var.dim: x(4, 5), [1], True, True
var.correction: x(4, 5), [0], correction=0
var.correction: c(4, 5), [0, 1], correction=2, keepdim=True
std: x(4, 5)
std.correction: x(4, 5), [0], correction=1
std.dim: x(4, 5), [0], False
var_mean.correction: x(4, 5), [0], correction=1
var_mean: x(4, 5)
std_mean.correction: x(4, 5), [1], correction=1, keepdim=True
max: same(4, 5)
max.dim: same(4, 5), 1
max.dim: x(4, 5), 0, True
max.other: x(4, 5), x(5)
min: x(4, 5)
min.dim: same(4, 5), 0
min.dim: i(9, 4, 5), 0
min.other: x(4, 5), x(4, 1)
argmax: same(4, 5), 0
median: x(4, 5)
median.dim: x(4, 5), 1
nanmedian.dim: x(4, 5), 0, True
mode: i(3, 4, 5), 1
aminmax: x(4, 5), dim=1
aminmax: x(4, 5), dim=0, keepdim=True
kthvalue: x(4, 5), 2
sort: x(4, 5), 0
sort.stable: x(4, 5), stable=True
argsort: x(4, 5), 1, True
cummax: x(4, 5), 1
cummin: x(4, 5), 0
topk: x(4, 5), 2, 1
topk: x(4, 5), 2
logcumsumexp: x(4, 5), 1
logcumsumexp: x(4, 5), 0
renorm: x(4, 5), 2, 0, 1.0
trace: x(4, 5)
glu: x(4, 10)
glu: x(8, 5), 0
view_as_real: c(4, 5)
amin: i(9, 4, 5), [1]
any: b(4, 5)
any.dim: b(4, 5), 1, True
all: b(4, 5)
all.dim: b(4, 5), 0
argmax: x(4, 5)
argmax: x(4, 5), 1
argmin: x(4, 5), 0, True
argmin: x(4, 5), 1
argmin: x(4, 5)
argmin: i8(4, 5), 0
min.dim: b(4, 5), 0
max.dim: b(4, 5), 0
softmax.int: x(4, 5), -1
softmax.int: x(4, 5), 0, torch.float32
_softmax: x(4, 5), 1, False
special_softmax: x(4, 5), 1
log_softmax.int: x(4, 5), -1
_log_softmax: x(4, 5), 0, False
special_log_softmax: x(4, 5), 1
cumsum: x(4, 5), 0
cumsum: i(9, 4, 5), 1
cumprod: x(4, 5), 1
layer_norm: x(3, 4, 5), [5], x(5), x(5)
layer_norm: x(3, 4, 5), [4, 5], x(4, 5)
layer_norm: x(3, 5), [5]
rms_norm: x(3, 4, 5), [5], x(5)
rms_norm: x(3, 4, 5), [4, 5], None, 1e-3
embedding: x(7, 4), i(7, 3, 5)
embedding: x(7, 4), i(7, 5), 2
embedding: x(7, 4), i(7, 5), -1, True
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 4, 6, 3), x(2, 4, 6, 5)
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 4, 5, 3), x(2, 4, 5, 3), is_causal=True
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 2, 5, 3), x(2, 2, 5, 3), is_causal=True, enable_gqa=True
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 2, 4, 3), x(2, 2, 4, 3), enable_gqa=True, scale=0.5
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 4, 6, 3), x(2, 4, 6, 5), x(5, 6)
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 4, 6, 3), x(2, 4, 6, 5), x(2, 1, 5, 6)
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 2, 6, 3), x(2, 2, 6, 5), x(2, 4, 5, 6), enable_gqa=True
scaled_dot_product_attention: x(2, 4, 5, 3), x(2, 4, 6, 3), x(2, 4, 6, 5), tri(5, 6)
scaled_dot_product_attention: x(5, 3), x(4, 3), x(4, 3)
scaled_dot_product_attention: x(2, 6, 12, 3), x(2, 6, 12, 3), x(2, 6, 12, 4)
scaled_dot_product_attention: x(6, 12, 3), x(6, 12, 3), x(6, 12, 4), is_causal=True
scaled_dot_product_attention: x(12, 3), x(12, 3), x(12, 3), is_causal=True, scale=0.5
scaled_dot_product_attention: x(1, 6, 12, 2), x(1, 3, 12, 2), x(1, 3, 12, 2), is_causal=True, enable_gqa=True
scaled_dot_product_attention: x(2, 6, 6, 3), x(2, 6, 6, 3), x(2, 6, 6, 3), tri(6, 6)
scaled_dot_product_attention: x(2, 6, 6, 3), x(2, 6, 6, 3), x(2, 6, 6, 3), x(6, 6)
scaled_dot_product_attention: x(1, 6, 6, 3), x(1, 3, 6, 3), x(1, 3, 6, 3), tri(1, 6, 6, 6), enable_gqa=True
scaled_dot_product_attention: x(1, 6, 6, 3), x(1, 3, 6, 3), x(1, 3, 6, 3), x(1, 1, 6, 6), enable_gqa=True
cross_entropy_loss: x(4, 5), i(5, 4)
cross_entropy_loss: x(4, 5), i(5, 4), p(5)
cross_entropy_loss: x(4, 5), i(5, 4), p(5), 0
cross_entropy_loss: x(4, 5), i(5, 4), None, 2, 3
cross_entropy_loss: x(4, 5), i(5, 4), p(5), 1, 3, 0.1
cross_entropy_loss: x(4, 5, 3), i(5, 4, 3), p(5), 1, 3
cross_entropy_loss: x(4, 5), p(4, 5)
cross_entropy_loss: x(4, 5, 3), p(4, 5, 3), p(5), 1, -100, 0.2
cross_entropy_loss: x(4, 5), p(4, 5), None, 0
cross_entropy_loss: x(5), i(5)
nll_loss: x(4, 5), i(5, 4), p(5)
nll_loss_nd: x(4, 5, 3), i(5, 4, 3), p(5), 1, 2
nll_loss_nd: x(4, 5), i(5, 4), None, 0
nll_loss2d: x(4, 5, 3, 2), i(5, 4, 3, 2), None, 2
mse_loss: x(4, 5), x(4, 5)
mse_loss: x(4, 5), x(5), 2
mse_loss: x(4, 5), x(4, 5), 0
l1_loss: x(4, 5), x(4, 5)
smooth_l1_loss: x(4, 5), x(4, 5), 1, 0.5
huber_loss: x(4, 5), x(4, 5), 1, 0.5
soft_margin_loss: x(4, 5), x(4, 5).sign()
kl_div: x(4, 5), p(4, 5)
kl_div: x(4, 5), x(4, 5), 1, log_target=True
poisson_nll_loss: x(4, 5), p(4, 5), True, False, 1e-8, 1
hinge_embedding_loss: x(4, 5), x(4, 5).sign()
ctc_loss.Tensor: x(7, 5, 4).log_softmax(-1), i(3, 5, 3), torch.tensor([7, 5, 6, 7, 4]), torch.tensor([2, 0, 1, 2, 1]), 3
ctc_loss.Tensor: x(7, 2, 4).log_softmax(-1), i(3, 2, 1), torch.tensor([7, 5]), torch.tensor([1, 1]), 3, 0
ctc_loss.Tensor: x(7, 2, 4).log_softmax(-1), i(3, 2, 3), torch.tensor([7, 2]), torch.tensor([2, 3]), 3, 2, True
margin_ranking_loss: x(5), x(5), x(5).sign(), 0.1
binary_cross_entropy: p(4, 5), p(4, 5)
binary_cross_entropy: p(4, 5), p(4, 5), p(4, 5), 1
binary_cross_entropy: p(4, 5), p(4, 5), None, 0
binary_cross_entropy_with_logits: x(4, 5), p(4, 5)
binary_cross_entropy_with_logits: x(4, 5), p(4, 5), p(4, 1), p(5), 1
index.Tensor: x(5, 4), [i(5, 3)]
index.Tensor: x(5, 4, 3), [None, i(4, 3, 2)]
index.Tensor: x(5, 4, 3), [i(4, 3, 1) - 1, i(4, 2)]
index.Tensor: x(5, 4, 3), [i(5, 2), None, i(3, 2)]
index_put: x(5, 4), [i(5, 3)], x(3, 4)
index_put: x(5, 4), [i(5, 3)], x(4), True
index_put: x(5, 4), [None, i(4, 1)], x(5, 1)
index_put: x(5, 4), [None, i(4, 1)], x()
index_put: x(5, 4), [b(5, 4)], x()
index_put: x(5, 4), [b(5)], x(1)
index_select: x(5, 4), 0, i(5, 3)
index_select: x(5, 4), -1, i(4)
gather: x(5, 4), 1, i(4, 5, 3)
gather: x(5, 4), 0, i(5, 3, 4)
gather: x(5, 4), 0, i(5, 3, 2)
scatter.value: x(5, 4), 1, i(4, 5, 2), 2.0
scatter.src: x(5, 4), 1, torch.randperm(4).expand(5, 4), x(5, 4)
scatter.src: x(5, 4), 1, torch.randperm(4).expand(3, 4), x(5, 4)
scatter.reduce: x(5, 4), 0, i(5, 3, 4), x(3, 4), reduce="add"
scatter.value_reduce: x(5, 4), 0, i(5, 3, 4), 2.0, reduce="multiply"
scatter_add: x(5, 4), 0, i(5, 7, 4), x(7, 4)
scatter_add: x(5, 4), 1, i(4, 5, 3), x(5, 3)
scatter_reduce.two: x(5, 4), 0, i(5, 7, 4), x(7, 4), "amax"
index_copy: x(5, 4), 0, torch.tensor([3, 1]), x(2, 4)
index_copy: x(5, 4), 1, torch.tensor([3]), x(5, 1)
index_add: x(5, 4), 0, torch.tensor([3, 1, 3]), x(3, 4), alpha=2
index_fill.int_Scalar: x(5, 4), 0, torch.tensor([3, 1]), 2.0
index_fill.int_Tensor: x(5, 4), -1, torch.tensor([3, 1]), x()
index_reduce: x(5, 4), 0, torch.tensor([3, 1, 3]), x(3, 4), "mean"
take: x(5, 4), i(20, 3, 2)
slice_scatter: x(5, 4), x(2, 4), 0, 1, 3
slice_scatter: x(5, 4), x(5, 4), 1, 0, 4
select_scatter: x(5, 4), x(5), 1, 2
diagonal_scatter: x(5, 4), x(4)
diagonal_scatter: x(3, 5, 4), x(3, 4), 0, 1, 2
one_hot: i(3, 4, 5), 3
embedding_bag: x(7, 4), i(7, 6), torch.tensor([0, 2, 5])
searchsorted.Tensor: torch.tensor([0.2, 0.5], dtype=torch.float64), p(4, 5)
searchsorted.Tensor: x(4, 3).sort().values, x(4, 5)
linalg_solve: spd(4, 3), x(4, 3, 5)
linalg_solve: spd(4, 3), x(4, 3)
linalg_solve_triangular: spd(4, 3).tril(), x(4, 3, 5), upper=False
cholesky_solve: x(4, 3, 5), torch.linalg.cholesky(spd(4, 3))
cdist: x(2, 4, 3), x(2, 5, 3)
kron: x(4, 5), x(3, 2)
fft_fftn: x(4, 5), None, [1]
fft_fftn: x(4, 5, 3), [2, 3]
fft_irfftn: c(4, 5), None, [0]
fft_fft2: x(4, 5, 3)
linalg_matrix_power: spd(4, 3), 2
matrix_power: spd(4, 3), 2
conv1d: x(2, 4, 5), x(6, 4, 3), x(6), [1], [1]
conv1d: x(2, 4, 8), x(6, 4, 3), None, [2]
conv1d: x(4, 5), x(6, 4, 3), x(6), [1], [1]
conv1d.padding: x(2, 4, 5), x(6, 4, 3), x(6), [1], "same"
conv1d.padding: x(2, 4, 5), x(6, 4, 4), x(6), [1], "same", [3]
conv2d.padding: x(2, 4, 5, 6), x(4, 4, 2, 3), x(4), [1, 1], "same"
conv2d.padding: x(2, 4, 5, 6), x(4, 2, 3, 4), None, [1, 1], "same", [1, 1], 2
conv3d.padding: x(2, 4, 4, 5, 4), x(3, 4, 3, 2, 1), x(3), [1, 1, 1], "same"
conv3d.padding: x(2, 4, 4, 4, 4), x(3, 4, 2, 2, 2), x(3), [1, 1, 1], "valid"
conv2d: x(2, 4, 5, 6), x(4, 4, 3, 3), x(4), [1, 1], [1, 1]
conv2d: x(2, 4, 6, 6), x(4, 4, 5, 3), x(4), [1, 1], [4, 0], [2, 1]
conv2d: x(2, 6, 5, 5), x(8, 3, 3, 3), x(8), [1, 1], [1, 1], [1, 1], 2
conv2d: x(2, 4, 5, 5), x(4, 1, 3, 3), x(4), [1, 1], [1, 1], [1, 1], 4
conv3d: x(2, 2, 4, 4, 4), x(3, 2, 3, 3, 3), None, [1, 1, 1], [1, 1, 1]
conv_transpose1d: x(2, 4, 5), x(4, 6, 3), x(6), [2], [1], [1]
conv_transpose2d.input: x(2, 4, 5, 5), x(4, 3, 3, 3), x(6), [1, 1], [0, 0], [0, 0], 2
conv_transpose3d.input: x(2, 2, 3, 3, 3), x(2, 3, 2, 2, 2)
max_pool1d: x(4, 5, 6), [2]
max_pool2d: x(2, 4, 6, 6), [2, 2]
max_pool3d: x(1, 4, 4, 4, 4), [2, 2, 2]
max_pool1d_with_indices: x(4, 5, 6), [2]
max_pool2d_with_indices: x(4, 5, 6, 6), [2, 2], [1, 1]
max_pool3d_with_indices: x(4, 4, 4, 4), [2, 2, 2]
avg_pool1d: x(4, 5, 6), [2]
avg_pool2d: x(4, 5, 6, 6), [3, 3], [1, 1], [1, 1]
avg_pool2d: i(9, 4, 5, 6, 6), [3, 3]
avg_pool3d: x(4, 4, 4, 4), [2, 2, 2]
adaptive_avg_pool1d: x(4, 5, 6), [3]
adaptive_avg_pool2d: x(4, 5, 6, 6), [1, 1]
adaptive_avg_pool3d: x(4, 4, 4, 4), [2, 2, 2]
adaptive_max_pool1d: x(4, 5, 6), [3]
adaptive_max_pool2d: x(4, 5, 6, 6), [2, 2]
adaptive_max_pool3d: x(4, 4, 4, 4), [2, 2, 2]
upsample_nearest1d: x(4, 5, 6), [9]
upsample_nearest2d.vec: x(4, 5, 3, 3), None, [2.0, 2.0]
upsample_nearest2d: x(4, 5, 3, 3), [6, 7]
upsample_nearest3d: x(1, 4, 2, 2, 2), [4, 4, 4]
_upsample_nearest_exact2d: x(4, 5, 3, 3), [6, 7]
upsample_linear1d: x(4, 5, 6), [9], True
upsample_bilinear2d.vec: x(4, 5, 3, 3), [6, 6], False, None
upsample_bicubic2d: x(4, 5, 3, 3), [6, 6], False
upsample_trilinear3d: x(1, 4, 2, 2, 2), [4, 4, 4], False
reflection_pad1d: x(4, 5, 6), [1, 2]
reflection_pad2d: x(4, 5, 6, 6), [1, 2, 1, 0]
reflection_pad3d: x(1, 4, 3, 3, 3), [1, 1, 1, 1, 1, 1]
replication_pad1d: x(4, 5, 6), [1, 2]
replication_pad2d: x(4, 5, 6, 6), [1, 2, 1, 0]
replication_pad3d: x(1, 4, 3, 3, 3), [1, 1, 1, 1, 1, 1]
constant_pad_nd: x(4, 5), [1, 0]
constant_pad_nd: x(4, 5), [0, 0, 1, 2], 3.0
pad: x(4, 5), [0, 1]
pad: x(4, 5), [1, 1], "reflect"
pad: x(4, 5), [1, 1], "constant", 2.0
batch_norm: x(4, 5), p(5), x(5), None, None, True, 0.1, 1e-5, False
batch_norm: x(4, 5, 3), None, None, x(5), p(5), True, 0.1, 1e-5, False
batch_norm: x(4, 5, 3, 2), p(5), x(5), x(5), p(5), False, 0.1, 1e-5, False
group_norm: x(4, 10, 3), 5, x(10), x(10)
group_norm: x(4, 6), 2
group_norm: x(4, 6, 4, 2), 3, x(6)
instance_norm: x(4, 5, 6), x(5), x(5), None, None, True, 0.1, 1e-5, False
pixel_shuffle: x(2, 16, 3, 5), 2
pixel_shuffle: x(1, 8, 1, 3), 2
pixel_unshuffle: x(1, 2, 4, 2), 2
channel_shuffle: x(1, 6, 1, 2), 3
pixel_unshuffle: x(2, 4, 6, 4), 2
channel_shuffle: x(2, 8, 3), 2
im2col: x(2, 4, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]
col2im: x(2, 16, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1]
grid_sampler: x(2, 4, 5, 5), x(2, 4, 5, 2), 0, 0, False
bilinear: x(4, 5), x(4, 3), x(6, 5, 3), x(6)
_weight_int8pack_mm: (i(3, 4, 64) - 1).bfloat16(), i8(8, 64).clamp(-1, 1), torch.ones(8).bfloat16()
_weight_int4pack_mm_for_cpu: (i(3, 4, 64) - 1).bfloat16(), pack4(128, 64), 32, torch.ones(2, 128, 2).bfloat16()
_weight_int4pack_mm_for_cpu: (i(3, 4, 64) - 1).bfloat16(), pack4(96, 64), 32, torch.ones(2, 96, 2).bfloat16()
_scaled_mm: f8(4, 64), f8(32, 64).t(), one(), one(), None, None, torch.float32
_scaled_mm: f8(4, 48), f8(32, 48).t(), one(1), one(1), i(9, 32).float(), None, torch.float32
_scaled_mm: f8(5, 32), f8(48, 32).t(), i(3, 5, 1).float(), i(3, 1, 48).float(), None, None, torch.bfloat16
fake_quantize_per_tensor_affine: f(4, 5), 0.1, 3, -8, 7
fake_quantize_per_tensor_affine.tensor_qparams: f(4, 5), one() / 8, i(3).int(), -8, 7
fake_quantize_per_channel_affine: f(4, 5), (1 + i(4, 4)) / 16, i(3, 4).int(), 0, -8, 7
_fake_quantize_learnable_per_tensor_affine: f(4, 5), one(1) / 8, one(1), -8, 7
_fake_quantize_learnable_per_channel_affine: f(4, 5), (1 + i(4, 5)) / 16, i(3, 5).float(), 1, -8, 7
unsqueeze_copy: x(4, 5), 1
squeeze_copy: x(4, 1, 5)
diagonal_copy: x(3, 4, 5)
unfold_copy: x(4, 5), 1, 2, 1
t_copy: x(4, 5)
transpose_copy.int: x(3, 4, 5), 0, -1
expand_copy: x(1, 5), [4, 5]
broadcast_to: x(1, 5), [4, 5]
narrow_copy: x(4, 5), 1, 1, 3
select_copy.int: x(4, 5), -1, 2
slice_copy.Tensor: x(4, 5), 1, 1, 3
unbind_copy.int: x(3, 4), 0
split_with_sizes_copy: x(4, 6), [3, 3], -1
split_copy.Tensor: x(4, 6), 3, 1
rot90: x(4, 5, 3), 1, [0, 2]
view_as: x(4, 6), x(2, 12)
reshape_as: x(4, 6), x(6, 4)
expand_as: x(1, 5), x(4, 5)
argsort.stable: x(4, 5), stable=True
nanmean: x(4, 5), [1]
dist: x(4, 5), x(4, 5)
dist: x(4, 5), x(5), 1
_safe_softmax: x(4, 5), 1
cross: x(4, 3), x(4, 3), 1
cross: x(7, 3), x(7, 3)
grid_sampler_2d: x(2, 4, 5, 5), x(2, 4, 5, 2), 0, 0, False
grid_sampler_3d: x(1, 4, 3, 3, 3), x(1, 4, 5, 2, 3), 0, 0, False
_upsample_nearest_exact1d: x(4, 5, 6), [9]
_upsample_nearest_exact3d: x(1, 4, 2, 2, 2), [4, 4, 4]
mse_loss: x(), x()
huber_loss: x(), x(), 0
dist: x(), x()
stack: [x(), x()]
select_scatter: x(5), x(), 0, 2
sum: x()
prod: x()
amax: x()
var: x(), False
softmax.int: x(), 0
cumsum: x(), 0
einsum: "i,->i", [x(5), x()]
where.self: b(), x(), x()
to.dtype: x(), torch.float32
prelu: x(), x(1)
squeeze: x()
unsqueeze: x(), 0
permute: x(), []
cross_entropy_loss: x(5), i(5), p(5)
isin.Tensor_Tensor: i(9, 4, 5), i(9, 2, 3)
isin.Tensor_Scalar: i(9, 4, 5), 3
index.Tensor: b(4, 5), [i(4, 3)]
index.Tensor: b(4, 5), [None, i(5, 3)]
index_select: b(4, 5), 0, i(4, 3)
gather: b(4, 5), 0, i(4, 3, 5)
unflatten.int: x(4, 0), 1, [2, 0, 3]
_is_any_true: b(4, 5) & b(4, 5)
_is_all_true: b(4, 5) | b(4, 5)
mode: i(3, 4, 5).double()
mode: x(4, 5), 0, True
native_layer_norm: x(4, 5, 3), [5, 3], x(5, 3), x(5, 3), 1e-5
native_layer_norm: x(4, 5), [5], None, None, 1e-5
_softmax_backward_data: x(4, 5), p(4, 5), -1, torch.float64
_log_softmax_backward_data: x(4, 5), -p(4, 5), 0, torch.float64
masked_scatter: x(4, 5), b(4, 5), x(30)
masked_scatter: x(4, 5, 3), b(5, 1), x(6, 12)
masked_scatter: x(4, 5), b(4, 1), x(4, 5)
embedding_dense_backward: x(4, 5, 3), i(6, 4, 5), 6, -1, False
embedding_dense_backward: x(5, 3), i(3, 5), 4, 1, True
_unsafe_index.Tensor: x(4, 5), [None, i(5, 3)]
_unsafe_index_put: x(4, 5), [None, i(5, 1)], x(4, 1)
convolution: x(4, 4, 5), x(6, 4, 3), x(6), [1], [1], [1], False, [0], 1
convolution: x(2, 4, 5, 5), x(4, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2
convolution: x(2, 4, 5), x(4, 3, 2), x(3), [2], [0], [1], True, [1], 1
_convolution: x(4, 4, 5), x(6, 4, 3), x(6), [1], [1], [1], False, [0], 1, False, False, False, False
_upsample_bilinear2d_aa: x(4, 5, 6, 6), [3, 3], False
_upsample_bicubic2d_aa.vec: x(4, 5, 6, 6), None, False, [0.5, 0.5]
_adaptive_avg_pool2d: x(4, 5, 6, 6), [2, 2]
_adaptive_avg_pool3d: x(1, 4, 4, 4, 4), [2, 2, 2]
max_unpool2d: x(4, 5, 2, 1), torch.arange(2).view(2, 1).expand(4, 5, 2, 1).clone(), [4, 4]
max_unpool3d: x(1, 4, 1, 2, 1), torch.arange(2).view(1, 2, 1).expand(1, 4, 1, 2, 1).clone(), [2, 4, 2], [2] * 3, [0] * 3
fractional_max_pool2d: x(4, 5, 6, 6), [2, 2], [3, 3], p(4, 5, 2)
fractional_max_pool3d: x(2, 4, 4, 4, 4), [2, 2, 2], [2, 2, 2], p(2, 4, 3)
affine_grid_generator: x(4, 2, 3), [4, 3, 5, 6], False
affine_grid_generator: x(4, 3, 4), [4, 1, 2, 3, 4], True
_linalg_solve_ex: spd(4, 3), x(4, 3, 2)
linalg_lu_solve: spd(4, 3), torch.arange(1, 4).int().expand(4, 3), x(4, 3, 5)
linalg_lu_solve: spd(4, 3), torch.arange(1, 4).int().expand(4, 3), x(4, 5, 3), left=False
linalg_pinv.atol_rtol_tensor: spd(4, 3), rtol=p(4)
linalg_pinv.atol_rtol_tensor: spd(4, 3)
linalg_householder_product: x(4, 5, 3), p(4, 3)
_pdist_forward: x(4, 5), 2.0
_fft_c2c: c(4, 5, 3), [0, 2], 0, True
_fft_r2c: x(4, 5), [1], 0, True
_fft_c2r: c(4, 5), [1], 0, 8
stft: x(4, 16), 8, 4, 8, p(8), False, True, True
stft: x(16), 8, return_complex=True
stft: c(4, 16), 8, 4, None, None, False, False
stft: x(4, 16), 8, 4, 8, p(8), False, True, False
stft.center: x(4, 16), 8, 4, 8, p(8), True, "reflect", False, True, True
istft: c(4, 5, 7), 8, 4, 8, p(8)
istft: c(5, 7), 8, length=20
lstm.input: x(5, 4, 2), [x(2, 4, 2)] * 2, [x(8, 2), x(8, 2), x(8), x(8)] * 2, True, 2, 0.0, True, False, False
lstm.input: x(4, 5, 3), [x(2, 4, 2), x(2, 4, 2)], [x(8, 3), x(8, 2), x(8, 3), x(8, 2)], False, 1, 0.5, True, True, True
lstm.input: x(4, 5, 3), [x(1, 4, 2), x(1, 4, 3)], [x(12, 3), x(12, 2), x(2, 3)], False, 1, 0.0, False, False, True
gru.input: x(4, 5, 3), x(1, 4, 2), [x(6, 3), x(6, 2), x(6), x(6)], True, 1, 0.0, True, False, True
rnn_tanh.input: x(5, 4, 3), x(1, 4, 2), [x(2, 3), x(2, 2), x(2), x(2)], True, 1, 0.0, True, False, False
rnn_relu.input: x(5, 4, 3), x(1, 4, 2), [x(2, 3), x(2, 2)], False, 1, 0.0, True, False, False
elu_backward: x(4, 5), 1.0, 1.0, 1.0, False, x(4, 5)
gelu_backward: x(4, 5), x(4, 5), approximate="tanh"
gelu_backward: x(4, 5), x(4, 5)
hardshrink_backward: x(4, 5), x(4, 5), 0.5
hardsigmoid_backward: x(4, 5), x(4, 5)
hardswish_backward: x(4, 5), x(4, 5)
hardtanh_backward: x(4, 5), x(4, 5), -1.0, 1.0
leaky_relu_backward: x(4, 5), x(4, 5), 0.1, False
logit_backward: x(4, 5), p(4, 5), None
mish_backward: x(4, 5), x(4, 5)
native_dropout_backward: x(4, 5), b(4, 5), 2.0
sigmoid_backward: x(4, 5), p(4, 5)
silu_backward: x(4, 5), x(4, 5)
softplus_backward: x(4, 5), x(4, 5), 1.0, 20.0
softshrink_backward: x(4, 5), x(4, 5), 0.5
tanh_backward: x(4, 5), p(4, 5)
threshold_backward: x(4, 5), x(4, 5), 0.1
new_zeros: x(4, 5), [3]
new_ones: x(4, 5), [3, 2]
new_full: x(4, 5), [3], 2.0
new_empty: x(4, 5), [0]
"""


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _positive(x: Tensor) -> Tensor:
    return x @ x.mT + torch.diag(torch.arange(1.0, 1 + x.shape[-1], dtype=x.dtype))


NAMES: dict[str, Any] = {
    "torch": torch,
    "x": _normal,
    "p": lambda *s: torch.rand(s, dtype=torch.float64) * 0.8 + 0.1,
    "i": lambda n, *s: torch.randint(0, n, s),
    "i8": lambda *s: torch.randint(-9, 9, s, dtype=torch.int8),
    "f": torch.randn,
    "f8": lambda *s: torch.randint(-2, 3, s).to(torch.float8_e4m3fn),
    "one": lambda *s: torch.ones(s),
    "ends": lambda *s: torch.tensor(s, dtype=torch.int32),
    "b": lambda *s: torch.rand(s) < 0.6,
    "c": lambda *s: torch.randn(s, dtype=torch.complex128),
    "same": lambda *s: torch.randint(0, 2, s).double(),
    "tri": lambda *s: torch.ones(s, dtype=torch.bool).tril(),
    "spd": lambda b, n: _positive(torch.randn(b, n, n, dtype=torch.float64)),
    "pack4": lambda n, k: torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(7, 10, (n, k)).int(), 1),
    "call": lambda *args, **kwargs: (args, kwargs),
}


def overload(name: str) -> Any:
    """Return an overload by its name, `add.Tensor`, or the first overload of `neg`."""
    packet, _, which = name.partition(".")
    found = getattr(torch.ops.aten, packet)
    return getattr(found, which or ("default" if "default" in found.overloads() else found.overloads()[0]))


def lines() -> Iterator[tuple[str, str]]:
    """Yield operator and arguments of every sample."""
    for line in TABLE.strip().splitlines():
        name, _, arguments = line.partition(": ")
        yield name, arguments
    for name in (*pointwise.LINEAR.split(), *pointwise.CURVED.split()):
        yield name, DOMAIN.get(name, "x(4, 5)" if name in pointwise.LINEAR.split() else "p(4, 5)")
    for names in linalg.MATRIX.values():
        yield from ((name, "spd(4, 3)") for name in names.split() if "power" not in name)
    for name in f"{linalg.FFT_ONE_DIM} {linalg.FFT_ANY_DIMS} {linalg.FFT_TWO_DIMS}".split():
        yield name, "x(4, 5)" if name in ("fft_rfft", "fft_rfftn", "fft_rfft2", "fft_ihfft") else "c(4, 5)"
    for name in pointwise.BINARY.split():
        if name.startswith(POLYNOMIALS):
            yield name, "p(4, 5), i(4, 5)"
        elif name == "ldexp" or name in INTEGERS.split():
            yield _tensor_overload(name), "i(9, 4, 5), i(3, 5)"
        else:
            yield _tensor_overload(name), "p(4, 5), p()" if name == "fill" else "p(4, 5), p(5)"


def _tensor_overload(name: str) -> str:
    names = getattr(torch.ops.aten, name).overloads()
    best = [o for o in ("Tensor", "Tensor_Tensor", "default", "other") if o in names]
    return f"{name}.{best[0] if best else names[0]}"


GONE = {"cholesky", "qr"}
"""Operators that torch 2.15 has removed."""


def samples() -> list[tuple[str, str]]:
    """Return the samples of operators that this torch has."""
    gone = {name for name in GONE if not hasattr(torch.ops.aten, name)}
    return [(name, arguments) for name, arguments in lines() if name not in gone]


def build(name: str, arguments: str) -> Sample:
    torch.manual_seed(sum(map(ord, name + arguments)))
    args, kwargs = eval(f"call({arguments})", dict(NAMES))
    packet = name.partition(".")[0]
    constant = packet in CONSTANT or "int64" in arguments or "reduce=" in arguments
    return Sample(overload(name), args, kwargs, None if constant else FIXED.get(packet, ()))
