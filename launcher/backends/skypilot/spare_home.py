"""Another home of SkyPilot's than the run's own, for asking providers where that one is of no use.

    in memory            when the run's own on disk cannot be written
    in the run's folder  with a process in it that has imported all it needs: the guardian has one from the
                         beginning, for the day on which this package is replaced in mid-run

Neighbours: `teardown.py` moves here as its last way to end a machine, `machine_of_record.py` finds
`stand_by`; `sky_home.py` is what it is made like. It has the credentials and no books: providers list and
end machines by the cluster's name without them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.base.errors import LaunchError

# Where Linux keeps files in memory; elsewhere the temporary folder has to do, which may be on another disk.
_MEMORY = "/dev/shm"
# In the run's folder, of whoever stands by; the rest of the name is each one's own.
STANDS_BY = "skypilot-spare"


@dataclass(frozen=True)
class SpareHome:
    """`sky` answers in it; nothing that SkyPilot says there is kept."""

    home: SkyHome
    sky: SkyProcess

    @classmethod
    def of(cls, home: SkyHome) -> Self:
        """One for the same clouds. Raises OSError when there is room nowhere, PreflightError."""
        trouble: OSError | None = None
        for place in (_MEMORY, None):
            try:
                folder = Path(tempfile.mkdtemp(prefix="slipway-spare-", dir=place))
            except OSError as error:
                trouble = error
                continue
            spare = cls._in(home.beside(folder))
            try:
                spare.home.make()
                return spare
            except (OSError, LaunchError) as error:
                spare.remove()
                if isinstance(error, LaunchError):
                    raise
                trouble = error
        assert trouble is not None  # both have failed
        raise trouble

    @classmethod
    def _in(cls, home: SkyHome) -> Self:
        return cls(home, SkyProcess(home, Path(os.devnull)))

    def remove(self) -> None:
        """Its process and its files; its links' targets stay. Raises nothing."""
        self.sky.end()
        with contextlib.suppress(OSError, LaunchError):
            self.home.remove_folder()


def stand_by(machine: dict[str, Any]) -> SpareHome:
    """For the machine of this description; before anything is asked of a provider. `remove` it.

    Its process imports SkyPilot meanwhile: nobody waits for that. Raises OSError, PreflightError.
    """
    own_id = machine["run_id"].removeprefix("slip-")
    folder = Path(machine["folder"])
    for left in folder.glob(f"{STANDS_BY}*"):
        home = SkyHome(left, machine["infra"], own_id)
        if not home.processes():  # else a guardian of an earlier life is still at it
            SpareHome._in(home).remove()
    # A name of its own: a guardian takes away its own, whenever that is, and no later life's.
    own = Path(tempfile.mkdtemp(prefix=f"{STANDS_BY}-", dir=folder))
    spare = SpareHome._in(SkyHome(own, machine["infra"], own_id))
    try:
        spare.home.make()
        spare.sky.stand_by()
    except BaseException:  # a Ctrl-C too goes on as it came; what was begun stays with nobody
        spare.remove()
        raise
    return spare
