"""A machine by ssh without a network: the real ssh, and a real sshd at the other end of its ProxyCommand.

Each connection has an sshd of its own, which ends with it. The "machine" is a folder, the home there.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from launcher.backends.ssh.link import SshHost
from launcher.records.records import RecordStore, RunRecord
from tests.support import descendants


class OwnSshd:
    """`folder` gets keys and configuration, `home` is the home on the machine: a folder in it by default."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        folder.mkdir(parents=True)
        self.home = home or folder / "home-there"
        self.home.mkdir()
        self.known_hosts = folder / "known_hosts"
        self._folder = folder
        self.key = self._make_key("login")
        (folder / "authorized").write_text(self.key.with_suffix(".pub").read_text())
        said = {
            "HostKey": f'"{self._make_key("host")}"',
            "AuthorizedKeysFile": f'"{folder / "authorized"}"',
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "SetEnv": f'"HOME={self.home}"',
            "LogLevel": "ERROR",
        }
        self._config = folder / "sshd_config"
        self._config.write_text("".join(f"{key} {value}\n" for key, value in said.items()))

    def host(self) -> SshHost:
        """How it is reached."""
        return SshHost("machine", getpass.getuser(), self.key, self.known_hosts, proxy_command=self._way)

    def rented(self, store: RecordStore, name: str) -> RunRecord:
        """A live run of this name whose machine this is; its logs are in `logs`."""
        record = store.create(name=name)
        folder = store.folder(record.id)
        login = {"user": getpass.getuser(), "key": str(self.key), "port": 22, "proxy_command": self._way}
        standing = {"ssh": login, "address": "machine", "price_per_hour": 0.0, "where": "here"}
        machine = {
            "kind": "cloud", "run_id": record.id, "folder": str(folder), "infra": ["aws"], "gpus": "H100:1",
            "idle_minutes": 10, "disk_gb": None, "variant": "cpu", "asked": False, "standing": standing,
        }  # fmt: skip
        self.logs(record).mkdir(parents=True)
        return store.update(record.id, state="work", machine=machine)

    def logs(self, record: RunRecord) -> Path:
        """Where the machine keeps a run's logs."""
        return self.home / "slipway" / record.id / "logs"

    @staticmethod
    def cut(pid: int) -> bool:
        """Break the connections that a process and those below it have open; whether there were any."""
        servers = descendants.named("sshd", pid)
        descendants.send(servers, signal.SIGKILL)
        return bool(servers)

    def _make_key(self, name: str) -> Path:
        path = self._folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        return path

    @property
    def _way(self) -> str:
        """sshd itself; root's asks for a folder of its own, which it gets where nobody else sees it."""
        sshd = shlex.join([shutil.which("sshd") or "/usr/sbin/sshd", "-i", "-f", str(self._config)])
        if os.getuid() != 0:
            return sshd
        own_folder = "mount -t tmpfs run /run && mkdir -m 755 /run/sshd"
        return shlex.join(["unshare", "--mount", "sh", "-c", f"{own_folder} && exec {sshd}"])
