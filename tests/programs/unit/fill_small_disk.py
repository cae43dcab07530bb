"""Lives runs whose home, a small file system, is full from some phase on: `fill_small_disk.py FOLDER`.

In this process, one for each phase. Then there is room again, and whoever is left ends the run: its
guardian's code, or that of `launch gc` where no guardian was started. Says as JSON, by phase, how it was.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from launcher.backends import machine_from_record
from launcher.records.endpoint import RESULTS
from launcher.teardown import guardian, take_down
from launcher.types.machine import Progress, PullReport, Stopped, never_stopped, no_progress
from tests.programs.unit.live_on_small_disk import fill
from tests.support import pretend_machine
from tests.support.pretend_calls import PHASES
from tests.support.pretend_life import PretendLife, Seen
from tests.support.pretend_machine import PretendMachine

# Full already when the run is about to begin.
BEFORE = "before"
_RESULT = "came-home"
_RESULT_BYTES = 8192
_FILLING = "filling"


class MachineWithResults(PretendMachine):
    """Its results need room at home. What comes free there meanwhile, somebody else fills."""

    def pull(
        self, into: Path, progress: Progress = no_progress, stopped: Stopped = never_stopped
    ) -> PullReport:
        report = super().pull(into, progress, stopped)
        (into / _RESULT).write_bytes(bytes(_RESULT_BYTES))
        return report

    def down(self) -> None:
        filling = self.folder.parents[1] / _FILLING
        if filling.exists():
            fill(filling)
        super().down()


def live(small: Path, phase: str) -> dict[str, Any]:
    """How it was."""
    filling = small / _FILLING
    folder = small / phase
    folder.mkdir()
    life = PretendLife(folder, MachineWithResults)
    if phase == BEFORE:
        fill(filling)
    seen = life("plain", entered={phase: lambda: fill(filling)})
    said = {
        "full_bytes": filling.stat().st_size,
        "code": seen.code,
        "asked": seen.asked,
        "let_go": seen.guardian is not None and seen.guardian.let_go,
        "state": None if seen.record is None else seen.record.state,
        "stderr": seen.stderr,
    }
    filling.unlink()
    said |= _ended_later(life, seen)
    shutil.rmtree(folder)
    return said


def _ended_later(life: PretendLife, seen: Seen) -> dict[str, Any]:
    """How it is when there is room again."""
    if seen.record is None:
        return {}
    run_id = seen.record.id
    if seen.guardian is None:
        take_down.take_down(life.store, seen.record, "gc")
    else:
        guardian._end(life.store, run_id, seen.record.launch)
    record = life.store.load(run_id)
    result = seen.folder / RESULTS / _RESULT
    at_home = result.exists() and result.stat().st_size == _RESULT_BYTES
    return {"state_later": record.state, "ended_by": record.ended_by, "at_home": at_home}


def main(small: Path) -> None:
    machine_from_record._KINDS[pretend_machine.KIND] = pretend_machine.PLACE
    print(json.dumps({phase: live(small, phase) for phase in (BEFORE, *PHASES[:-1])}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
