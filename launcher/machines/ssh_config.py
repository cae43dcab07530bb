"""What lets plain `ssh RUN` and `scp` find a run: a file in its folder, one Include line for them all.

    ~/.ssh/config          Include "…/runs/*/ssh_config"      the one line, first, where it was agreed to
    runs/<id>/ssh_config   Host slip-0123abcd my-name …       while the machine lives

The machine's host key is the one the run has pinned. Neighbours: `cloud.py` writes and forgets, `run.py` and
`launch ssh` add the line when they may. Knows nothing of SkyPilot, and nothing of the user's other lines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import PreflightError
from launcher.machines.link import Host
from launcher.safety import locks

FILE = "ssh_config"
_LOCK = ".ssh-config.lock"


def write(folder: Path, host: Host, names: Sequence[str]) -> None:
    """Say in a run's folder how it is reached under these names."""
    said = {
        "HostName": host.address,
        "User": host.user,
        "Port": str(host.port),
        "IdentityFile": f'"{host.key}"',
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": f'"{host.known_hosts}"',
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "accept-new",
        "UpdateHostKeys": "no",
    }
    if host.proxy_command is not None:
        said["ProxyCommand"] = host.proxy_command
    lines = [f"Host {' '.join(names)}", *(f"  {key} {value}" for key, value in said.items())]
    _replace(folder / FILE, "\n".join(lines) + "\n")


def forget(folder: Path) -> None:
    """The machine is gone: its names go, and with the last run's the line in the user's configuration."""
    (folder / FILE).unlink(missing_ok=True)
    runs = folder.parent
    with contextlib.suppress(OSError), _alone(runs):
        config = _config()
        if any(runs.glob(f"*/{FILE}")) or not config.exists():
            return
        lines = _text(config).splitlines(keepends=True)
        kept = [line for line in lines if line.strip() != _line(runs)]
        if len(kept) == len(lines):
            return
        if kept:
            _replace(config, "".join(kept))
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
        with _alone(runs):
            text = _text(config) if config.exists() else ""
            _replace(config, f"{_line(runs)}\n{text}")
    except OSError as error:
        raise PreflightError(f"{config} cannot be written", error.strerror, "launch ssh RUN") from error
    return True


def _line(runs: Path) -> str:
    return f'Include "{runs}/*/{FILE}"'


def _config() -> Path:
    """The user's own, behind any link: a tool that keeps dotfiles may have made one."""
    return (Path.home() / ".ssh" / "config").resolve()


def _text(path: Path) -> str:
    """Whatever bytes are in it, for `_replace` to write again: it is the user's, and may not be UTF-8."""
    return path.read_text(errors="surrogateescape")


def _replace(path: Path, text: str) -> None:
    """A whole file or the old one, for nobody but this user."""
    aside = path.with_name(f".{path.name}.slipway")
    aside.write_text(text, errors="surrogateescape")
    aside.chmod(0o600)
    aside.replace(path)


@contextlib.contextmanager
def _alone(runs: Path) -> Iterator[None]:
    """Two runs may begin and end at once."""
    descriptor = os.open(runs / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locks.hold(descriptor, runs)
        yield
    finally:
        os.close(descriptor)
