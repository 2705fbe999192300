"""Bad input: each case has an error that names the cause and the fix, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import meshwright as mw
from meshwright.quantize import CalibrationError, NumberFormat, QuantizeError, Scheme

from .models import perceptron, state_of


def with_nan() -> nn.Module:
    model = perceptron()
    with torch.no_grad():
        model.get_parameter("2.weight")[3, 4] = float("nan")
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return perceptron()


def without_numbers() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.in_features = 0  # torch warns of a layer that begins without numbers
    return nn.Sequential(layer)


def gates() -> nn.Module:
    return nn.ModuleDict({"gate": nn.Linear(4, 4), "up": nn.Linear(4, 4)})


CASES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "unknown scheme": (perceptron, "w4a16-gpqt", "write 'w4a16-gptq'"),
    "scheme of another library": (perceptron, object(), 'mw.quantize(model, "w4a16")'),
    "odd group": (perceptron, "w4a16", "use group_size=16, which fits all layers"),
    "NaN in a weight": (with_nan, "int8", "ignore=('2',)"),
    "meta device": (on_meta, "int8", "mw.materialize"),
    "quantized already": (lambda: mw.quantize(perceptron(), "int8"), "int8", "quantize the original model"),
    "no module": (lambda: [nn.Linear(4, 4)], "int8", "quantize the module"),
    "no layer": (nn.ReLU, "int8", "pass a model with nn.Linear layers"),
    "all layers ignored": (perceptron, Scheme.preset("int8", ignore=("Linear",)), "left_out"),
    "a name with a mistake": (gates, Scheme.preset("int8", targets=("gat",)), "write 'gate'"),
    "one of two names with a mistake": (perceptron, Scheme.preset("int8", targets=("0", "twoo")), "remove the pattern"),
    "an ignored name with a mistake": (gates, Scheme.preset("int8", ignore=("gaet",)), "write 'gate'"),
    "an expression with a mistake": (gates, Scheme.preset("int8", ignore=("re:.*gat[^e]$",)), "write 'gate'"),
    "stars": (gates, Scheme.preset("int8", ignore=("*.gate",)), r"'re:.*\\.gate'"),
    "a lazy layer": (lambda: nn.Sequential(nn.LazyLinear(4)), "int8", "call the model once before"),
    "rows of no numbers": (without_numbers, "int8", "ignore=('0',)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case: str) -> None:
    make, scheme, fix = CASES[case]
    model = make()
    has_numbers = case not in ("meta device", "no module", "a lazy layer")
    before = {name: x.clone() for name, x in model.state_dict().items()} if has_numbers else {}
    with pytest.raises(QuantizeError) as caught:
        mw.quantize(model, scheme)
    assert fix in caught.value.write
    if has_numbers:
        after = model.state_dict()
        assert all(torch.equal(x, after[name]) or not x.isfinite().all() for name, x in before.items())


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: NumberFormat(9), "NumberFormat(4)"),
        (lambda: NumberFormat(4, "float"), "NumberFormat(8, \"float\")"),
        (lambda: NumberFormat(4, strategy="group"), "group_size=128"),
        (lambda: NumberFormat(4, group_size=32), "group_size=128"),
        (lambda: NumberFormat(8, "float", symmetric=False), "symmetric=False"),
        (lambda: Scheme(NumberFormat(8, strategy="token")), "channel"),
        (lambda: Scheme(NumberFormat(8), method="best"), "gptq"),  # pyright: ignore[reportArgumentType]
        (lambda: Scheme(NumberFormat(4, "nf"), method="gptq"), "nearest"),
        (lambda: Scheme.preset("int8", group_size=32), "group_size"),
        (lambda: Scheme(NumberFormat(8), NumberFormat(8, strategy="token")), "dynamic=True"),
        (lambda: Scheme.preset("int8", ignore="lm_head"), "ignore=('lm_head',)"),  # pyright: ignore[reportArgumentType]
        (lambda: Scheme.preset("int8", targets=("re:*.up",)), r"'re:.*\\.up'"),
        (lambda: mw.convert_to_float8_training(gates(), targets="up"), "('up',)"),  # pyright: ignore[reportArgumentType]
        (lambda: mw.convert_to_float8_training(gates(), ignore=("upp",)), "write 'up'"),
        (lambda: mw.prepare_qat(nn.Sequential(Conv1D(4, 4))), "an nn.Linear that has the transposed weight"),
    ],
)  # fmt: skip
def test_a_scheme_that_does_not_fit_is_refused(make: Callable[[], Any], fix: str) -> None:
    with pytest.raises(QuantizeError) as caught:
        make()
    assert fix in caught.value.write


def test_calibration_data_is_needed() -> None:
    model = perceptron()
    before = state_of(model)
    with pytest.raises(CalibrationError, match="no calibration data"):
        mw.quantize(model, Scheme.preset("w4a16-gptq", group_size=16))
    assert before.keys() == state_of(model).keys()
