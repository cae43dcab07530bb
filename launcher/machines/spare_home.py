"""A home of SkyPilot's in memory, for asking providers when the run's own home on disk cannot be written.

Neighbours: `teardown.py` moves here as its last way to end a machine; `sky_home.py` is what it is made like.
It has the credentials and no books: providers list and end machines by the cluster's name without them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launcher.errors import LaunchError
from launcher.machines.sky_home import SkyHome
from launcher.machines.sky_process import SkyProcess

# Where Linux keeps files in memory; elsewhere the temporary folder has to do, which may be on another disk.
_MEMORY = "/dev/shm"


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
        """Its process and its files; its links' targets stay."""
        self.sky.end()
        shutil.rmtree(self.home.folder, ignore_errors=True)
