"""A rented machine over ssh: its host, its user's home, and the run's folders there.

Neighbours: `cloud_machine.py` asks, `link.py` is the way to a host, `remote_folder.py` one folder on it. Of
SkyPilot it knows only the cluster's entry in the books.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.backends.ssh import machine_scripts, model_upload
from launcher.backends.ssh.link import SshHost, run_on
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.base.errors import LaunchError


class RemoteMachine:
    """The machine of one run, whose folder here is `folder`; `cluster_status()` is SkyPilot's entry, None
    before it is armed."""

    def __init__(
        self, run_id: str, folder: Path, cluster_status: Callable[[], dict[str, Any] | None]
    ) -> None:
        self._run_id = run_id
        self._folder = folder
        self._cluster_status = cluster_status
        self._user_home: str | None = None
        self._run_folder: RemoteFolder | None = None

    @property
    def host(self) -> SshHost:
        """Its ssh address, once armed. Raises LaunchError."""
        cluster_status = self._cluster_status()
        if cluster_status is None or cluster_status["ssh"] is None:
            raise LaunchError(
                f"{self._run_id} has no machine to reach", "it is not reachable by ssh yet", None
            )
        return SshHost.from_cluster_status(cluster_status, self._folder / "known_hosts")

    @property
    def seen(self) -> Path:
        """The local copy of the run's folder there."""
        return self._folder / "machine"

    @property
    def user_home(self) -> str:
        """The home of its user; asked once."""
        if self._user_home is None:
            self._user_home = run_on(self.host, 'printf %s "$HOME"').stdout.decode()
        return self._user_home

    @property
    def state_dir(self) -> str:
        """The run's folder there."""
        return f"{self.user_home}/slipway/{self._run_id}"

    def run_folder(self) -> RemoteFolder:
        """The one RemoteFolder of the run, so that its refreshes are counted."""
        host = self.host
        if self._run_folder is None or self._run_folder.host != host:
            self._run_folder = RemoteFolder(host, self.state_dir, self.seen)
        return self._run_folder

    def code(self) -> RemoteFolder:
        """The folder of the runtime's code."""
        return RemoteFolder(self.host, f"{self.user_home}/{machine_scripts.CODE}", self._folder)

    def model_path(self, model: str) -> str:
        """The runtime's path of a model: a user's folder there, any other by its name."""
        return model_upload.remote_path(model, self.user_home)

    def forget(self) -> None:
        """Forget everything about the run's earlier machine."""
        shutil.rmtree(self.seen, ignore_errors=True)
        (self._folder / "known_hosts").unlink(missing_ok=True)
