"""The folders of this user: runs, caches, configuration.

Neighbours: `records/records.py` keeps its records under `runs`, `setting_sources.py` reads `user_config`.
`LAUNCH_HOME` overrides the XDG folders. Knows nothing of the files' content.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

APP = "slipway"


@dataclass(frozen=True)
class Home:
    """The three folders of this user; nothing is created before something is written there."""

    data: Path
    config: Path
    cache: Path

    @classmethod
    def find(cls, environ: dict[str, str] | None = None) -> Home:
        """`LAUNCH_HOME` if set and not empty, else the XDG folders of `slipway`."""
        override = (os.environ if environ is None else environ).get("LAUNCH_HOME")
        if override:
            root = Path(override).expanduser().absolute()
            return cls(data=root, config=root, cache=root / "cache")
        import platformdirs  # costs 40 ms, and a test or a container sets LAUNCH_HOME

        return cls(
            data=Path(platformdirs.user_data_dir(APP, appauthor=False)),
            config=Path(platformdirs.user_config_dir(APP, appauthor=False)),
            cache=Path(platformdirs.user_cache_dir(APP, appauthor=False)),
        )

    @property
    def runs(self) -> Path:
        """One folder for each run: `record.json`, `launch.log`, `machine/`, `results/`."""
        return self.data / "runs"

    @property
    def benches(self) -> Path:
        """One folder for each `launch bench`: figures, logs, and its runs' own homes."""
        return self.data / "bench"

    @property
    def user_config(self) -> Path:
        """The user's own settings, for all projects."""
        return self.config / "config.toml"

    @property
    def environments(self) -> Path:
        """The runtime's built environments, shared by all runs."""
        return self.cache / "environments"

    @property
    def timings(self) -> Path:
        """The file of phase durations."""
        return self.cache / "timings.json"

    def run_folder(self, run_id: str) -> Path:
        return self.runs / run_id
