"""Run checks of conformance on a device whose platform comes from an entry point; write the faults of this rank."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch

import meshwright as mw
from meshwright.conformance import LEVELS, NotRun, Target
from meshwright.layout import device_types

FEWEST = 60


def main(folder: Path) -> None:
    here = mw.init_process()
    kind = device_types()[-1]
    floating = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    target = Target(torch.device(kind, here.rank), 2, floating, folder)
    faults: dict[str, str] = {}
    for check in LEVELS[3]:
        try:
            check.run(target)
        except NotRun as reason:
            faults[check.name] = str(reason)
        except Exception:
            faults[check.name] = traceback.format_exc()
            break  # the other rank may be inside the check
    found = {"device": kind, "checks": len(LEVELS[3]), "faults": faults}
    (folder / f"{here.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
