"""Ranks that make the same collectives for different tensors get an error; ranks that run one program never do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.comm import launch

SCRIPT = Path(__file__).with_name("_identity_program.py")
CASES = {
    "other_order": "made at _identity_program.py:",
    "other_operator": "for the whole value",
    "other_number": "for the whole value",
    "other_operand": "for the whole value",
    "other_gradient": "gradient",
    "other_parameter": "for the gradients of parameters",
    "other_step": "lr of group 0 of SGD is 0.1 on rank 0 and 0.2 on rank 1",
    "one_step_less": "for the check of a step",
    "other_random_state": "state of the random generator of cpu before its last use",
    "other_norm": "the norm to which gradients are clipped is 1.0 on rank 0 and 0.5 on rank 1",
    "other_norm_of_torch": "for the check of a step",
    "other_hook": "for the check of a step",
    "other_batch": "made at _identity_program.py:",
    "other_steps_of_training": "steps is 1 on rank 0 and 2 on rank 1",
    "other_seed": "torch.initial_seed() is 0 on rank 0 and 1 on rank 1",
}


@pytest.fixture(scope="module")
def reports_of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the reports of two processes, which have different hashes of strings."""
    folder = tmp_path_factory.mktemp("two")
    assert launch([str(SCRIPT), str(folder)], 2, env={"PYTHONHASHSEED": "random"}, timeout=100) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("case", "words"), CASES.items())
def test_calls_for_other_values_are_named_on_both_ranks(
    reports_of_two_processes: list[dict[str, str]], case: str, words: str
) -> None:
    for found in reports_of_two_processes:
        assert found[case].startswith("DisagreementError")
        assert words in found[case]
