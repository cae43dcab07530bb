"""A standby SkyPilot home: it asks providers when the run's own home cannot.

    in memory            when the run's own on disk cannot be written
    in the run's folder  with a process in it that has imported all it needs: the guardian has one from the
                         beginning, in case this package is replaced in mid-run

Neighbours: `cluster_teardown.py` moves here as its last way to end a machine, `machine_from_record.py` finds
`start_standby`; it is made like a `sky_home.py`. It has the credentials and no books: providers list and
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
# The beginning of a standby home's name in the run's folder; the rest of the name is unique.
STANDBY_FOLDER = "skypilot-spare"


@dataclass(frozen=True)
class StandbyHome:
    """`sky` asks providers from it; SkyPilot's state in it is not kept."""

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
            standby_home = cls._in(home.sibling(folder))
            try:
                standby_home.home.make()
                return standby_home
            except (OSError, LaunchError) as error:
                standby_home.remove()
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


def start_standby(machine: dict[str, Any]) -> StandbyHome:
    """Start a standby home for the machine of this description, before any provider is asked. The caller must
    `remove` it.

    Its process imports SkyPilot in the background. Raises OSError, PreflightError.
    """
    own_id = machine["run_id"].removeprefix("slip-")
    folder = Path(machine["folder"])
    for left in folder.glob(f"{STANDBY_FOLDER}*"):
        home = SkyHome(left, machine["infra"], own_id)
        if not home.processes():  # else a guardian of an earlier life is still at it
            StandbyHome._in(home).remove()
    # A name of its own: a guardian takes away its own, whenever that is, and no later life's.
    own = Path(tempfile.mkdtemp(prefix=f"{STANDBY_FOLDER}-", dir=folder))
    standby_home = StandbyHome._in(SkyHome(own, machine["infra"], own_id))
    try:
        standby_home.home.make()
        standby_home.sky.warm_up()
    except BaseException:  # a Ctrl-C is raised again too; the unfinished home is removed
        standby_home.remove()
        raise
    return standby_home
