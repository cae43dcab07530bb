"""Ends the machines of a run that SkyPilot's books never had: `python end_forgotten.py RUN_ID`."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.backends.cloud_machine import CloudMachine


def main(run_id: str) -> None:
    folder = Path.cwd() / "run"
    machine = CloudMachine(run_id, folder, infra=["aws"], gpus="H100:4", idle_minutes=10, variant="cpu")
    print(machine.proof())
    # Killed between the asking and the books' first entry: this is all that is known of the run.
    other = CloudMachine.from_description(machine.describe() | {"asked": True})
    other.down()
    print(other.proof())
    assert not (folder / "skypilot").exists()


if __name__ == "__main__":
    main(sys.argv[1])
