"""`meshwright profile`: measurements become a cluster file that `plan` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.cli import main
from meshwright.cli.commands import profile, profile_products
from meshwright.cli.ranks import measure
from meshwright.comm import current_communicator
from meshwright.cost import cluster
from meshwright.quantize.products import ANY, MostRows, built_in_rows
from meshwright.quantize.products.most_rows import most_rows

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use ranks in this process, and small tasks."""

    def launch(argv: Sequence[str], ranks: int) -> int:
        cpu = torch.device("cpu")
        told = mw.simulate(lambda: measure.measure(current_communicator(), float(argv[3]), cpu), ranks)
        Path(argv[2]).write_text(json.dumps(told[0]))
        return 0

    monkeypatch.setattr(profile, "launch", launch)
    monkeypatch.setattr(profile, "device_types", lambda: ("cpu",))
    monkeypatch.setattr(measure, "ON_CPU", measure.Sizes((16, 32), 4096))
    monkeypatch.setattr(measure, "MESSAGES", (4, 1024))


def test_a_cluster_file_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.toml"
    assert main(["profile", "--ranks", "2", "--seconds", "0.001", "--out", str(out)]) == 0
    assert f"--cluster {out}" in capsys.readouterr().out
    made = cluster(str(out))
    assert (made.devices, made.per_node) == (2, 2)
    assert set(made.device.flops) >= {torch.float32, torch.float64, torch.bfloat16}
    assert made.inside.start > 0
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "vocab_size": 100,
            }
        )
    )
    assert main(["plan", str(config), "--cluster", str(out), "--batch", "4", "--sequence", "16"]) == 0


def test_it_prints_json_and_runs_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--ranks", "1", "--seconds", "0.001", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [m["what"] for m in told["measurements"]] == ["product"] * 6 + ["copy", "overhead"]
    assert "inside" not in told
    assert all(m["seconds"] > 0 for m in told["measurements"])
    assert main(["profile", "--ranks", "1", "--seconds", "0.001"]) == 0
    assert "[device]" in capsys.readouterr().out


def test_a_dry_run_measures_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profile, "launch", lambda argv, ranks: 1)
    assert main(["profile", "--ranks", "4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 concurrent processes" in out
    assert "10 measurements, about" in out
    assert main(["profile", "--ranks", "4"]) == 1
    assert "meshwright doctor" in capsys.readouterr().err


def test_the_table_of_products_is_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile_products, "measure_rows", lambda on_step: MostRows(3, ANY, 0))
    most_rows.cache_clear()
    assert main(["profile", "--products", "--dry-run"]) == 0
    assert most_rows() == built_in_rows()
    assert main(["profile", "--products"]) == 0
    assert "half precision any" in capsys.readouterr().out
    assert most_rows() == MostRows(3, ANY, 0)
    assert main(["profile", "--products", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["most_rows"] == {"codes": 3, "half": "any", "integers": 0}
    Path(told["kept_in"]).write_text('{"codes": "many"}')
    most_rows.cache_clear()
    assert most_rows() == built_in_rows()
    most_rows.cache_clear()
    assert main(["profile", "--products", "--ranks", "2"]) == 2
