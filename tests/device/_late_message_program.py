"""Receive on a device in processes: the host goes on, and an error of a message reaches it later."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import meshwright as mw
from meshwright.comm import Communicator, DisagreementError
from tests.device.inspection import Devices
from tests.device.process_backend import register_backend

MESSAGES, ROUNDS, GO, LAST = 4, 8, 9, 10
OF_HOST = -1.0


def send(here: Communicator, device: torch.device, of: int) -> None:
    for tag in range(MESSAGES):
        here.send(torch.full((3,), of + tag, dtype=torch.float32, device=device), 1, tag)


def receive(here: Communicator, device: torch.device) -> list[torch.Tensor]:
    return [here.receive(0, tag, (3,), torch.float32, device) for tag in range(MESSAGES)]


def send_last_tag_first(here: Communicator, device: torch.device) -> None:
    """Send two messages with the last tag, one from the device and one from the host, long before the others."""
    here.send(torch.ones(3, device=device), 1, MESSAGES - 1)
    here.send(torch.full((3,), OF_HOST), 1, MESSAGES - 1)
    time.sleep(0.2)
    for tag in range(MESSAGES - 1):
        here.send(torch.zeros(3, device=device), 1, tag)


def sender(here: Communicator, device: torch.device) -> None:
    for n in range(ROUNDS):
        send(here, device, n)
    send_last_tag_first(here, device)
    here.receive(1, GO, (1,), torch.float32, "cpu")
    send(here, device, ROUNDS)
    here.receive(1, GO, (1,), torch.float32, "cpu")
    here.send(torch.ones(4, device=device), 1, 0)
    here.receive(1, LAST, (1,), torch.float32, "cpu")


def receiver(here: Communicator, device: torch.device) -> dict[str, object]:
    """Receive messages which the other rank sends only after this one has gone on, and one of another shape."""
    firsts = [float(x[0]) for _ in range(ROUNDS) for x in receive(here, device)]
    stream = torch.Stream(device)
    with stream:
        late = receive(here, device)
        of_host = here.receive(0, MESSAGES - 1, (3,), torch.float32, "cpu")
        lasts = [x * 2 for x in receive(here, device)]
        here.send(torch.ones(1), 0, GO)
        torch.accelerator.synchronize()
    with stream:
        wrong = here.receive(0, 0, (3,), torch.float32, device)
        here.send(torch.ones(1), 0, GO)
    try:
        here.settle()
        error = ""
    except DisagreementError as found:
        error = str(found)
    here.send(torch.ones(1), 0, LAST)
    torch.accelerator.synchronize()
    return {
        "firsts": firsts,
        "one tag": [late[-1].tolist(), of_host.tolist()],
        "lasts": [float(x[0]) for x in lasts],
        "error": error,
        "is nan": bool(wrong.isnan().all()),
    }


def main(folder: Path) -> None:
    devices = Devices()
    register_backend()
    here = mw.init_process()
    device = torch.device("mesh", here.rank)
    found = receiver(here, device) if here.rank else sender(here, device)
    races = len(devices.take_races())
    (folder / f"{here.rank}.json").write_text(json.dumps([found, races]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
