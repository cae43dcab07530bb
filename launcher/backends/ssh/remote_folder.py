"""A run's folder on a machine, over ssh: writes to it, lists it, copies from it.

Neighbours: `cloud_machine.py` owns one, `link.py` reaches the machine, `results_download.py` downloads its
results; `runtime_start.py`, `results_copy.py` and `durable.py` read the copy here as if the run were on this
computer. Content goes over ssh's stdin, never into a command line; secrets go into no file at all
(`remote_job.py`). Knows nothing of SkyPilot.
"""

from __future__ import annotations

import io
import shlex
import tarfile
import time
from pathlib import Path

from launcher.backends.ssh import rsync
from launcher.backends.ssh.link import MAX_OUTPUT_BYTES, SshHost, run_on
from launcher.backends.ssh.machine_scripts import CODE, EXIT
from launcher.backends.ssh.rsync import RsyncError, Transfer
from launcher.base import atomic
from launcher.base.errors import JobFailed

_STATES = ("keeper.json", "supervisor.json", "trainer.json", EXIT)
_WRITE_SECONDS = 30.0
_REFRESH_SECONDS = 20.0
# A look is an ssh connection of its own: soon at first, then more rarely. The shortest lease is 15 s.
_MIN_REFRESH_INTERVAL_SECONDS = 1.0
_MAX_REFRESH_INTERVAL_SECONDS = 5.0
_LOG_BYTES = 8192
_SSH = ".copy_ssh_config"
# For rsync's -e, in the folder that `write_ssh_config` names.
SSH_BY_FILE = f"ssh -F {_SSH}"


class RemoteFolder:
    """`there`, a folder on `host`, and `here`, its last local copy."""

    def __init__(self, host: SshHost, there: str, here: Path) -> None:
        self.host = host
        self.there = there
        self.here = here
        self._looked_at = float("-inf")
        self._look_after = _MIN_REFRESH_INTERVAL_SECONDS

    def make(self, sockets: str) -> None:
        """Make the run's folder, there and here, and its folder of sockets there, for their user alone."""
        self.here.mkdir(mode=0o700, parents=True, exist_ok=True)
        places = f"{shlex.quote(self.there)}/logs {shlex.quote(sockets)}"
        self.shell(f"umask 077 && mkdir -p {places} && chmod 700 {places}", "create its folders")

    def write(self, name: str, content: bytes) -> None:
        """A file (0600), over ssh's stdin."""
        path = shlex.quote(f"{self.there}/{name}")
        self.shell(f"umask 077 && rm -f {path} && cat > {path}", f"write {name}", content)

    def refresh(self) -> None:
        """Download the small status files and the ends of the logs. This renews the lease, because a reader
        is a sign of life.

        At most once a second, and less often, down to every five seconds. Raises JobFailed when the machine
        cannot be reached.
        """
        if time.monotonic() - self._looked_at < self._look_after:
            return
        names = " ".join(_STATES)
        archive = self.shell(
            f"cd {shlex.quote(self.there)} && touch lease && rm -rf .look && mkdir -p .look/logs &&"
            f' for log in logs/*.log; do test -f "$log" && tail -c {_LOG_BYTES} "$log" >".look/$log"; done;'
            f" cp {names} .look/ 2>/dev/null; tar -C .look -cf - .",
            "read its state",
            bound_seconds=_REFRESH_SECONDS,
        )
        _unpack(archive, self.here)
        self._look_after = min(2 * self._look_after, _MAX_REFRESH_INTERVAL_SECONDS)
        self._looked_at = time.monotonic()

    def reset_timer(self) -> None:
        """Have the machine not end itself for its idle minutes, from now. Raises JobFailed."""
        set_back = f"cd ~/{CODE} && python3 -m runtime.autodown"
        self.shell(set_back, "reset its idle timer", bound_seconds=_REFRESH_SECONDS)

    def exit_code(self) -> int | None:
        """The exit code of the runtime's keeper, as of the last refresh; None while it runs."""
        try:
            return int((self.here / EXIT).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def send(self, folder: Path) -> None:
        """Copy a folder's content there. Raises JobFailed."""
        size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
        self.rsync(["-a", f"{folder}/", f"{self.host.address}:{self.there}/"], Transfer(size))

    def rsync(self, arguments: list[str], copy: Transfer) -> None:
        """rsync over an ssh connection of its own. Raises JobFailed."""
        try:
            rsync.run(["-e", SSH_BY_FILE, *arguments], self.write_ssh_config(), copy)
        except FileNotFoundError:
            raise JobFailed("copying needs rsync", "it is not on this computer", "launch doctor") from None
        except RsyncError as error:
            raise JobFailed(f"{self.host.address}: copying failed", error.why, None) from error

    def write_ssh_config(self) -> Path:
        """Write the ssh options to a file. Returns its folder, in which rsync is to be started.

        rsync gets the bare file name: macOS's splits its ssh command at blanks, quoted or not, and a home's
        path may have some.
        """
        folder = self.host.known_hosts.parent
        atomic.write(folder / _SSH, self.host.own_configuration(), private=True)
        return folder

    def shell(
        self,
        command: str,
        what: str,
        stdin: bytes = b"",
        bound_seconds: float = _WRITE_SECONDS,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> bytes:
        """Run a shell command there to its end; returns its output. Raises JobFailed, also when the
        command fails."""
        done = run_on(self.host, command, stdin=stdin, bound_seconds=bound_seconds, max_bytes=max_bytes)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise JobFailed(
                f"{self.host.address}: could not {what}",
                lines[-1] if lines else f"code {done.returncode}",
                None,
            )
        return done.stdout


def _unpack(archive: bytes, here: Path) -> None:
    """The files of an archive that a machine made: each by its name, none elsewhere. Python before 3.11.4 has
    no filter for that."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as seen:
        for member in seen:
            name = Path(member.name)
            if member.isfile() and not name.is_absolute() and ".." not in name.parts:
                content = seen.extractfile(member)
                assert content is not None  # it is a file
                (here / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                (here / name).write_bytes(content.read())
