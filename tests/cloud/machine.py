"""One machine: namespaces of its own on this computer's disk, copy-on-write, with an sshd and no way out.

Neighbours: `provider.py` starts one behind each instance; `inside/boot.sh` is what runs in it.
Knows nothing of EC2. Runs inside a rig's namespaces, where its links and processes end with the rig.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_ALONE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL")


@dataclass(frozen=True)
class Seed:
    """What a machine is told at boot: the user and its key, and who it is."""

    instance_id: str
    instance_type: str
    region: str
    login: str
    authorized_keys: Sequence[str]
    # What cloud-init runs last, as root; how many of its timers' seconds pass in one.
    commands: Sequence[str] = ()
    hurry: str = "1"


class Machine:
    """Up when made: its first process runs, sshd follows within a second. `end` is its power button."""

    def __init__(
        self, seed: Seed, address: str, folder: Path, *, image: Path, endpoint: str, binds: str
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        (folder / "authorized_keys").write_text("\n".join(seed.authorized_keys) + "\n")
        (folder / "commands").write_text("".join(f"{command}\n" for command in seed.commands))
        (folder / "hurry").write_text(seed.hurry)
        about = {"id": seed.instance_id, "type": seed.instance_type, "region": seed.region}
        (folder / "seed.json").write_text(json.dumps(about))
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": "/root",
            "FOLDER": str(folder),
            "ADDRESS": f"{address}/16",
            "NAME": f"ip-{address.replace('.', '-')}",
            "LOGIN": seed.login,
            "IMAGE": str(image),
            "RIG": str(HERE),
            "ENDPOINT": endpoint,
            "BINDS": binds,
        }
        with (folder / "boot.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*_ALONE, "bash", str(HERE / "inside" / "boot.sh")],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.stdout.readline() != b"unshared\n":
            raise RuntimeError(f"no machine: {(folder / 'boot.log').read_text()}")
        self._plug_in(f"m{address.rpartition('.')[2]}-{seed.instance_id[-8:]}")
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()

    def _plug_in(self, link: str) -> None:
        """A network cable between the rig's bridge and the machine's own namespace."""
        pid = str(self._process.pid)
        there = ["peer", "name", "eth0", "netns", pid]
        for arguments in (["add", link, "type", "veth", *there], ["set", link, "master", "bridge", "up"]):
            subprocess.run(["ip", "link", *arguments], check=True)

    @property
    def running(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """Everything in it is killed at once; its disk is gone."""
        self._process.kill()
        self._process.wait(timeout=120)
        shutil.rmtree(self._folder, ignore_errors=True)
