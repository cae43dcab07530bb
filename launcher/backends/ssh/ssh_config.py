"""Lets plain `ssh RUN` and `scp` find a run: an ssh configuration in its folder, one Include line for all
runs.

    ~/.ssh/config          Include "…/runs/*/ssh_config"      the one line, first, if the user agreed to it
    runs/<id>/ssh_config   Host slip-0123abcd my-name …       while the machine lives

The machine's host key is the one the run has pinned. Neighbours: `cloud_machine.py` writes and forgets,
`run.py` and `launch ssh` add the line when they may. Knows nothing of SkyPilot, and nothing of the user's
other lines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.backends.ssh.link import SshHost
from launcher.base import atomic, locks
from launcher.base.errors import PreflightError

FILE = "ssh_config"
# In ~/.ssh: a user has one ssh configuration, whichever home a run is in.
_LOCK = ".slipway.lock"


def write(folder: Path, host: SshHost, names: Sequence[str]) -> None:
    """Write the ssh configuration of a run's host, under these names, into the run's folder."""
    atomic.write(folder / FILE, host.configuration(*names), private=True)


def forget(folder: Path) -> None:
    """The machine is gone: its names go, and with the last run's the line in the user's configuration."""
    (folder / FILE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if _config().exists():
            _forget_line(folder.parent, _config())


def _forget_line(runs: Path, config: Path) -> None:
    with _config_lock():
        if any(runs.glob(f"*/{FILE}")):
            return
        lines = _text(config).splitlines(keepends=True)
        kept = [line for line in lines if line.strip() != _line(runs)]
        if len(kept) == len(lines):
            return
        if kept:
            atomic.write(config, "".join(kept), private=True)
        else:
            config.unlink()


def included(runs: Path) -> bool:
    """Whether plain `ssh` finds the runs of this folder."""
    try:
        return _line(runs) in map(str.strip, _text(_config()).splitlines())
    except OSError:
        return False


def include(runs: Path) -> bool:
    """Add the line, before all others: within a Host block it would hold for that host alone. Whether it had
    to be added. Raises PreflightError."""
    if included(runs):
        return False
    config = _config()
    try:
        config.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _config_lock():
            text = _text(config) if config.exists() else ""
            atomic.write(config, f"{_line(runs)}\n{text}", private=True)
    except OSError as error:
        raise PreflightError(f"{config} cannot be written", error.strerror, "launch ssh RUN") from error
    return True


def _line(runs: Path) -> str:
    return f'Include "{runs}/*/{FILE}"'


def _config() -> Path:
    """The user's own, behind any link: a tool that keeps dotfiles may have made one."""
    return (Path.home() / ".ssh" / "config").resolve()


def _text(path: Path) -> str:
    """Whatever bytes are in it, to be written again: it is the user's, and may not be UTF-8."""
    return path.read_text("utf-8", errors="surrogateescape")


@contextlib.contextmanager
def _config_lock() -> Iterator[None]:
    """Two runs may begin and end at once, also runs of two homes: their lines are in one file."""
    path = Path.home() / ".ssh" / _LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locks.acquire(descriptor, path)
        yield
    finally:
        os.close(descriptor)
