"""A rig: one test cloud and the laptop in front of it, in namespaces that nobody else sees.

    with Rig(folder) as rig:
        rig.run(["sky", "launch", …])        a command on the laptop, with the home `rig.home`
        rig.faults("no-capacity", "us-east-1a")
        rig.witness("terminate")             what the provider saw

Laptop, provider and machines share one pid, network and mount namespace that ends with its owner (this
process), however that ends; so two rigs never meet and nothing listens on the computer's own interfaces.
Neighbours: `provider.py` and `inside/world.py` run in it, `image.py` is what its machines boot,
`conftest.py` has the fixtures.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from tests.cloud import provider
from tests.cloud.image import PYTHON, image
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
HOST, PORT = "10.77.0.1", 5566
ENDPOINT = f"http://{HOST}:{PORT}"
# Debian's names; `.ci/run` installs them.
NEEDED = {
    "ip": "iproute2", "iptables": "iptables", "sshd": "openssh-server", "ssh": "openssh-client",
    "rsync": "rsync", "sudo": "sudo", "unshare": "util-linux", "nsenter": "util-linux",
    "patch": "patch", PYTHON: "python3.11",
}  # fmt: skip
_UP_SECONDS = 300
# Ends a program that would hang, and measures nothing.
_PROGRAM_SECONDS = 1800
_WORLD = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
# What a test run's own environment must not tell the laptop.
_NOT_FOR_THE_LAPTOP = (
    "AWS_",
    "SKYPILOT_",
    "LAUNCH_",
    "SLIPWAY_",
    "XDG_",
    "SSH_",
    "VIRTUAL_ENV",
    "UV_",
    "PIP_",
)


def missing() -> str | None:
    """Why there can be no rig on this computer; None when there can."""
    if sys.platform != "linux":
        return "a rig is made of Linux namespaces"
    if os.getuid() != 0:
        return "a rig needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = {package for tool, package in NEEDED.items() if shutil.which(tool, path=path) is None}
    return f"a rig needs: apt-get install {' '.join(sorted(packages))}" if packages else None


class Rig:
    """Up when entered, gone when left. `folder` must be empty; `binds` maps what machines see read-only."""

    def __init__(self, folder: Path, binds: Mapping[Path, str] | None = None) -> None:
        self.id = secrets.token_hex(4)
        self.folder = folder
        self.home = folder / "home"
        self._binds = "\n".join(f"{source}:{target}" for source, target in (binds or {}).items())
        self._world: subprocess.Popen[bytes] | None = None
        self._world_pid = 0
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        baked = image()
        self._make_home(baked)
        self._start_world()
        command = [sys.executable, "-m", "tests.cloud.provider", "--folder", str(self.folder)]
        command += ["--host", HOST, "--port", str(PORT), "--image", str(baked), "--binds", self._binds]
        with (self.folder / "provider.log").open("wb") as log:
            started = self.start(command, cwd=REPOSITORY, stdout=log, stderr=log)
        ready = self.folder / provider.READY
        wait_until(lambda: ready.exists() or started.poll() is not None, _UP_SECONDS, "the provider")
        assert ready.exists(), (self.folder / "provider.log").read_text()
        return self

    def __exit__(self, *_: object) -> None:
        world = self._world
        assert world is not None and world.stdin is not None
        world.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            world.wait(timeout=60)
        world.kill()
        world.wait()

    def _start_world(self) -> None:
        environ = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        self._world = subprocess.Popen(
            [*_WORLD, PYTHON, "-S", "-E", str(HERE / "inside" / "world.py"), f"{HOST}/16"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._world.stdout is not None
        assert self._world.stdout.readline() == b"ready\n", "no namespaces here"
        self._world_pid = _only_child(self._world.pid)

    def _make_home(self, baked: Path) -> None:
        """A user's home with an AWS account, SkyPilot's catalogs and its wheel, and nothing else."""
        aws = self.home / ".aws"
        aws.mkdir(parents=True)
        (aws / "config").write_text(f"[default]\nregion = us-east-1\nendpoint_url = {ENDPOINT}\n")
        keys = "aws_access_key_id = testing\naws_secret_access_key = testing\n"
        (aws / "credentials").write_text(f"[default]\n{keys}")
        (aws / "credentials").chmod(0o600)
        sky = self.home / ".sky"
        shutil.copytree(HERE / "catalogs", sky / "catalogs")
        shutil.copytree(baked / "wheels", sky / "wheels")
        # A wheel older than its package is built again, and a package grows younger whenever Python first
        # compiles a module in it.
        tomorrow = time.time() + 86400
        for path in (sky / "wheels").rglob("*"):
            os.utime(path, (tomorrow, tomorrow))
        (self.folder / provider.FAULTS).mkdir()

    # -------------------------------------------------------------- the laptop

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a command on the laptop."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_FOR_THE_LAPTOP)}
        for name in [name for name in kept if name.lower().endswith("_proxy")]:
            del kept[name]
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        # The hash names SkyPilot's folder of ssh sockets under /tmp: one of each rig's own.
        own = {"HOME": str(self.home), "PATH": path, "SKYPILOT_USER_ID": self.id}
        own |= {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "LAUNCH_HOME": str(self.folder / "launch")}
        return kept | own | more

    def start(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """A command on the laptop. The process returned waits for it; `send` signals the command itself."""
        where = ["--pid", "--net", "--mount", f"--target={self._world_pid}"]
        started = subprocess.Popen(
            ["nsenter", *where, f"--wdns={cwd or self.home}", "--", *command],
            env=dict(environ) if environ is not None else self.environ(),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._started.append(started)
        return started

    def send(self, started: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Signal what `start` started."""
        os.kill(_only_child(started.pid), number)

    def run(
        self,
        command: Sequence[str],
        *,
        seconds: float = 600,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """A command on the laptop to its end; AssertionError with all it said when it takes too long."""
        path = self.folder / f"command-{secrets.token_hex(4)}.log"
        with path.open("wb") as log:
            started = self.start(command, stdout=log, stderr=subprocess.STDOUT, environ=environ, cwd=cwd)
            try:
                code = started.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                self.send(started, signal.SIGKILL)
                text = path.read_text(errors="replace")
                raise AssertionError(f"{command[0]} took more than {seconds:g} s\n{text}") from None
        return Finished(code, path.read_text(errors="replace"))

    def run_program(self, name: str, *words: str) -> str:
        """What a program of `tests/programs/cloud` says on the laptop, when it goes well."""
        command = [sys.executable, str(PROGRAMS / "cloud" / name), *words]
        environ = self.environ(PYTHONPATH=str(REPOSITORY))
        return self.run(command, seconds=_PROGRAM_SECONDS, environ=environ).ok()

    def processes(self) -> dict[int, str]:
        """What runs in the rig, machines included: the pid out here and its command line."""
        found: dict[int, str] = {}
        waiting = [self._world_pid, *(started.pid for started in self._started)]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    waiting += map(int, (thread / "children").read_text().split())
        return found

    # -------------------------------------------------------------- the provider

    def faults(self, name: str, text: str | None = "") -> None:
        """Switch a fault of `provider.py` on; off again with None."""
        path = self.folder / provider.FAULTS / name
        if text is None:
            path.unlink(missing_ok=True)
            return
        aside = path.with_name(f".{name}")
        aside.write_text(text)
        aside.rename(path)

    def witness(self, *events: str) -> list[dict[str, Any]]:
        """What the provider wrote down, oldest first; only these events when some are named."""
        path = self.folder / provider.WITNESS
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [one for one in found if not events or one["event"] in events]

    def alive(self) -> list[str]:
        """The instances that cost money now, by the witness."""
        ran = [one["id"] for one in self.witness("run")]
        over = {one["id"] for one in self.witness("terminate")}
        return [instance for instance in ran if instance not in over]


class Finished:
    """A command that ended: its code and all it said."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        self.output = output

    def ok(self) -> str:
        """The output of a command that went well."""
        assert self.code == 0, f"code {self.code}\n{self.output}"
        return self.output


@contextlib.contextmanager
def rig_in(folder: Path, binds: Mapping[Path, str] | None = None) -> Iterator[Rig]:
    """A rig whose folder goes with it."""
    folder.mkdir(parents=True)
    try:
        with Rig(folder, binds) as rig:
            yield rig
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _only_child(pid: int) -> int:
    """`unshare` and `nsenter` fork once: the process that counts is the child."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return int(wait_until(lambda: path.read_text().split(), what=f"the child of {pid}")[0])
