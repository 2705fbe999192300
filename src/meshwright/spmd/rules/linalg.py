"""Rules of operators on whole matrices: decompositions, solvers, transforms. Batch dims are free."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.dim_names import Dims, dim_names, dims_of, operand_text, sized_name
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, Rule
from .pointwise import entries_for
from .products import cross_anywhere_rule
from .shapes import whole_dims_rule

MATRIX = {
    "m n": """linalg_cholesky cholesky linalg_inv inverse linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power
        cholesky_inverse""",
    "n m": "linalg_pinv.atol_rtol_float pinverse",
    "": "linalg_det det logdet linalg_matrix_rank.atol_rtol_float",
    "; ...": "linalg_slogdet slogdet",
    "m new ; ... new n": "linalg_qr qr",
    "m new ; ... new ; ... new n": "linalg_svd _linalg_svd",
    "new": "linalg_svdvals",
    "m ; ... m n": "linalg_eigh linalg_eig",
    "m": "linalg_eigvalsh linalg_eigvals",
    "m n ; ... new": "linalg_lu_factor",
    "new m ; ... m n ; ... n new": "linalg_lu",
    "m n ; ... new ; ...": "linalg_lu_factor_ex",
    "m n ; ...": "linalg_cholesky_ex linalg_inv_ex",
}
"""Continuation of the rule `"... m! n!, -> ..."` → operators of one matrix."""

FFT_ONE_DIM = "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"
FFT_ANY_DIMS = "fft_fftn fft_ifftn fft_rfftn fft_irfftn"
FFT_TWO_DIMS = "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"


def matrix_entries() -> dict[str, Entry]:
    return {f"aten.{name}": f"... m! n!, -> ... {after}" for after, names in MATRIX.items() for name in names.split()}


def solve_rule(a: Tensor, b: Tensor, *, left: bool = True, **kwargs: TorchValue) -> str | None:
    """Return the rule of `solve`: linear in the right-hand side, whose columns are free."""
    if not left:
        return None
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    return "... m! n! ? ... n -> ... m" if is_vector else "... m! n! ? ... n k -> ... m k"


def solve_ex_rule(a: Tensor, b: Tensor, *, left: bool = True, **kwargs: TorchValue) -> str | None:
    """Return the rule of `_linalg_solve_ex`, whose further results do not depend on the right-hand side."""
    if not left or b.dim() != a.dim():
        return None
    return "... m! n!, ... n! k! -> ... m k ; ... m n ; ... n ; ..."


def lu_solve_rule(lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> str:
    return "... m! n!, ... n!, ... n! k -> ... n k" if left else "... m! n!, ... n!, ... k n! -> ... k n"


def transformed(x: Tensor, dim: Sequence[int], *how: TorchValue) -> str:
    """Return the rule of the basic Fourier operators such as `_fft_c2c`."""
    return whole_dims_rule(x, dims_of(x, tuple(dim)))


def frames_entry(at: int) -> Entry:
    """Return the rule of `stft`: linear, given the window. `at` is the position of `return_complex`."""

    def entry(x: Tensor, *args: TorchValue, return_complex: bool | None = None, **kwargs: TorchValue) -> str:
        is_complex = args[at - 1] if len(args) >= at else return_complex
        pairs = "" if is_complex or (is_complex is None and x.is_complex()) else " newc"
        lead = "b " * (x.dim() - 1)
        return f"{lead}t! | w! -> {lead}newf newt{pairs}"

    return entry


def signal_rule(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> str:
    """Return the rule of `istft`: linear, given the window."""
    lead = "b " * (x.dim() - 2)
    return f"{lead}f! t! | w! -> {lead}newt"


def cdist_rule(x: Tensor, y: Tensor, p: float = 2, compute_mode: int | None = None) -> str:
    return "... p d!, ... r d! -> ... p r"


def kron_rule(x: Tensor, y: Tensor) -> Rule | None:
    """Return the rule of `torch.kron`: every dim of the result is the product of the two operands' dims.

    torch refuses some pairs of memory orders, and local parts may have other ones than the whole tensors.
    """
    if not x.dim() or x.dim() != y.dim() or 0 in (prod(x.shape), prod(y.shape)):
        return None
    names = dim_names(x, "a"), dim_names(y, "b")
    left = [sized_name(n, s) for n, s in zip(names[0], x.shape, strict=True)]
    right = [sized_name(n, s) for n, s in zip(names[1], y.shape, strict=True)]
    out = " ".join(f"({a} {b})" for a, b in zip(left, right, strict=True))
    forms = dict.fromkeys((*left, *right), _kron)
    return Rule(f"{operand_text(left)} * {operand_text(right)} -> {out}", forms=forms)


def _kron(call: LocalCall, x: Tensor, y: Tensor) -> Tensor:
    outer = x.reshape([n for size in x.shape for n in (size, 1)]) * y.reshape(
        [n for size in y.shape for n in (1, size)]
    )
    return outer.reshape([n * m for n, m in zip(x.shape, y.shape, strict=True)])


def fourier_rule(x: Tensor, n: TorchValue = None, dim: Dims = None, norm: str | None = None) -> str:
    """Return the rule of a Fourier transform: a linear map along whole dims."""
    if dim is None and isinstance(n, (list, tuple)):
        dim = range(x.dim() - len(n), x.dim())
    return whole_dims_rule(x, dims_of(x, dim))


def fourier_last_rule(x: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> str:
    return whole_dims_rule(x, dims_of(x, dim))


def fourier_two_rule(x: Tensor, s: TorchValue = None, dim: Dims = (-2, -1), norm: str | None = None) -> str:
    return whole_dims_rule(x, dims_of(x, dim))


FOURIER: dict[str, Entry] = {
    **entries_for(FFT_ONE_DIM, fourier_last_rule),
    **entries_for(FFT_ANY_DIMS, fourier_rule),
    **entries_for(FFT_TWO_DIMS, fourier_two_rule),
    **entries_for("_fft_c2c _fft_r2c _fft_c2r", transformed),
    "aten.stft": frames_entry(7),
    "aten.stft.center": frames_entry(9),
    "aten.istft": signal_rule,
}
"""Fourier transforms; their kernels refuse empty batches."""

LINALG: dict[str, Entry] = {
    **matrix_entries(),
    "aten.linalg_solve": solve_rule,
    "aten._linalg_solve_ex": solve_ex_rule,
    "aten.linalg_lu_solve": lu_solve_rule,
    "aten.linalg_pinv.atol_rtol_tensor": "... m! n!, ..., ... -> ... n m",
    "aten.linalg_householder_product": "... m! n!, ... k! -> ... m n",
    "aten._pdist_forward": "n! d!, -> new",
    "aten.linalg_solve_triangular": solve_rule,
    "aten.cholesky_solve": "... n! k | ... n m! -> ... n k",
    "aten.cross": cross_anywhere_rule,
    "aten.cdist": cdist_rule,
    "aten.kron": kron_rule,
}
