"""Builds the runtime's own environment from pinned files, once; after that it is found in milliseconds.

    python -m runtime.bootstrap --variant cpu --root DIR        prints the environment's python

An environment is a folder named after the hash of everything that decides its content. It is built under
another name and renamed when whole, its marker written last, so a killed build leaves nothing that is taken
for an environment; a lock lets two builders of the same one share the work.
Neighbours: `launcher/backends/local_machine.py` calls this here, the setup task on a rented machine.
Standard library only: it runs before there is anything else. Knows nothing of runs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
VARIANTS = ("cpu", "cuda")
# A cpu environment and uv's cache for it: 3.4 GB installed, the archives beside it.
NEEDED_BYTES = {"cpu": 8 * 10**9, "cuda": 25 * 10**9}
WAIT_SECONDS = 3600.0
# How long uv may print nothing before we print a line.
_PROGRESS_SECONDS = 15.0
MARKER = "environment.json"
_SHOWN_LINES = 20
UNSET_FOR_UV = ("VIRTUAL_ENV", "PYTHONPATH", "UV_FIND_LINKS")


class BootstrapError(Exception):
    """The environment cannot be built; the text is the reason, with uv's last lines."""


@dataclass(frozen=True)
class Environment:
    """The inputs of one environment. Two of the same `name` are interchangeable."""

    root: Path
    variant: str
    extras: tuple[str, ...] = ()
    requirements: Path = REQUIREMENTS
    interpreter: str = sys.executable

    def __post_init__(self) -> None:
        for name in (self.variant, *self.extras):
            if not self.lock_file(name).is_file():
                known = ", ".join(sorted(path.stem for path in self.requirements.glob("*.in")))
                raise BootstrapError(f"there is no requirement set {name!r} (there are: {known})")

    def lock_file(self, name: str) -> Path:
        """The fully pinned requirement file of a variant or an extra."""
        return self.requirements / f"{name}.txt"

    @property
    def lock_files(self) -> list[Path]:
        return [self.lock_file(name) for name in (self.variant, *self.extras)]

    @property
    def name(self) -> str:
        """The variant, and the hash over the packages, the Python and the machine."""
        version = ".".join(map(str, sys.version_info[:2]))
        identity = [sys.implementation.name, version, sys.platform, platform.machine(), self.variant]
        identity += [path.name + "\n" + path.read_text() for path in self.lock_files]
        digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()
        return f"{'-'.join((self.variant, *self.extras))}-py{version}-{digest[:12]}"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def is_complete(self) -> bool:
        """Whether it exists, its build was finished, and its interpreter (a link) still exists."""
        return (self.folder / MARKER).is_file() and os.access(self.python, os.X_OK)


def ensure_environment(
    root: Path,
    variant: str = "cpu",
    *,
    extras: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
    environ: Mapping[str, str] | None = None,
    requirements: Path = REQUIREMENTS,
) -> Path:
    """The python of the environment under `root`, built first if it is missing or broken.

    `extras` adds further pinned sets (`test`); `environ`: variables for uv beside this process's environment.
    Raises BootstrapError.
    """
    environment = Environment(Path(root).absolute(), variant, tuple(extras), requirements)
    if environment.is_complete():
        _mark_used(environment)
        return environment.python
    environment.root.mkdir(parents=True, exist_ok=True)
    with _build_lock(environment, progress):
        if not environment.is_complete():
            _build(environment, progress, dict(os.environ) | dict(environ or {}))
    return environment.python


def is_ready(root: Path, variant: str = "cpu", extras: Sequence[str] = ()) -> bool:
    """Whether `ensure_environment` would return at once."""
    return Environment(Path(root).absolute(), variant, tuple(extras)).is_complete()


def _mark_used(environment: Environment) -> None:
    """Record the use, so that `launch gc` does not offer an environment in use; a shared folder may be
    read-only."""
    with contextlib.suppress(OSError):
        os.utime(environment.folder / MARKER)


@contextlib.contextmanager
def _build_lock(environment: Environment, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the environment's lock; the system frees it when a builder dies."""
    descriptor = os.open(environment.root / f".{environment.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        bound = time.monotonic() + WAIT_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > bound:
                    raise BootstrapError(
                        f"another process has been building {environment.folder} for an hour"
                    ) from None
                if not told:
                    progress("another run is building the same environment: waiting for it")
                    told = True
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _build(environment: Environment, progress: Callable[[str], None], environ: dict[str, str]) -> None:
    """Build in a temporary folder, then rename. Called with the lock held, so anything in the way is the
    remains of a killed build."""
    begun = time.monotonic()
    for debris in environment.root.glob(f".{environment.name}.building-*"):
        shutil.rmtree(debris, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=f".{environment.name}.building-", dir=environment.root))
    try:
        uv = find_uv()
        # Relocatable: the scripts in bin/ must still find their python after the rename.
        _uv([uv, "venv", "--relocatable", "--allow-existing", "--python", environment.interpreter,
             str(building)], environment.root, progress, environ)  # fmt: skip
        _install(uv, environment, building / "bin" / "python", progress, environ)
        marker = {"name": environment.name, "seconds": round(time.monotonic() - begun, 1)}
        (building / MARKER).write_text(json.dumps(marker) + "\n")
        if environment.folder.exists():
            shutil.rmtree(environment.folder)
        building.rename(environment.folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _install(
    uv: str, environment: Environment, python: Path, progress: Callable[[str], None], environ: dict[str, str]
) -> None:
    """Install exactly the pinned packages of the lock files. torch's CPU build is not on PyPI: a configured
    folder of wheels has it, or PyTorch's own index."""
    command = [uv, "pip", "sync", "--python", str(python), *map(str, environment.lock_files)]
    places = find_links(environ)
    for place in places:
        command += ["--find-links", place]
    from_index = [*command, "--torch-backend", "cpu"]
    if holds_cpu_torch(places, environment.lock_file(environment.variant)):
        _uv(command, environment.root, progress, environ)
    elif any("://" in place for place in places):
        try:
            _uv(command, environment.root, progress, environ)
        except BootstrapError:
            _uv(from_index, environment.root, progress, environ)
    else:
        _uv(from_index, environment.root, progress, environ)


def find_links(environ: Mapping[str, str]) -> list[str]:
    """The configured folders of wheels: pip's variable is split at blanks, uv's at commas."""
    pip = environ.get("PIP_FIND_LINKS", "").split()
    uv = environ.get("UV_FIND_LINKS", "").split(",")
    places = (place.strip() for place in pip + uv if place.strip())
    return list(dict.fromkeys(place if "://" in place else os.path.abspath(place) for place in places))


def holds_cpu_torch(places: Sequence[str], lock_file: Path) -> bool:
    """Whether PyTorch's own index is not needed: the lock names no CPU build, or a folder here has it."""
    pins = [line.split(";")[0].strip() for line in lock_file.read_text().splitlines()]
    wanted = next((pin for pin in pins if pin.startswith("torch==") and pin.endswith("+cpu")), None)
    if wanted is None:
        return True
    wheel = wanted.replace("==", "-") + "-"
    for place in places:
        folder = Path(unquote(place.removeprefix("file://")))
        with contextlib.suppress(OSError):
            if any(unquote(name).startswith(wheel) for name in os.listdir(folder)):
                return True
    return False


def find_uv() -> str:
    """uv's binary: the one of this Python's package, else the one on the PATH. Raises BootstrapError."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        return os.fspath(importlib.import_module("uv").find_uv_bin())
    if found := shutil.which("uv"):
        return found
    raise BootstrapError("uv, which installs the runtime's packages, is missing: pip install uv")


def _uv(
    command: list[str],
    folder: Path,
    progress: Callable[[str], None],
    environ: dict[str, str],
    bound_seconds: float = WAIT_SECONDS,
) -> None:
    """Run uv in `folder` to its end, its lines going to `progress`; when we are interrupted it ends with us.

    The user's own folder may hold a project whose uv settings are not meant for us, and the environment
    this process runs in is not the one to fill.
    """
    last: collections.deque[str] = collections.deque(maxlen=_SHOWN_LINES)
    clean = {key: value for key, value in environ.items() if key not in UNSET_FOR_UV}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None  # a pipe, as asked for
        try:
            for line in _lines(process.stdout.fileno(), progress, bound_seconds):
                text = line.strip()
                if text and not text.startswith(("+ ", "Using ", "Activate ")):
                    last.append(text)
                    progress(text)
        except BaseException:  # a Ctrl-C too: uv must not go on building alone
            process.kill()
            raise
    if process.returncode != 0:
        output = "\n".join(last) or "(uv said nothing)"
        raise BootstrapError(f"uv {command[1]} ended with code {process.returncode}:\n{output}")


def _lines(descriptor: int, progress: Callable[[str], None], bound_seconds: float) -> Iterator[str]:
    """uv's lines as they come. A long silence is reported, and bounded."""
    begun = heard = time.monotonic()
    rest = b""
    while True:
        readable, _, _ = select.select([descriptor], [], [], _PROGRESS_SECONDS)
        now = time.monotonic()
        if now - begun > bound_seconds:
            raise BootstrapError(f"uv did not finish within {bound_seconds:.0f} s")
        if not readable:
            progress(f"uv printed nothing for {now - heard:.0f} s: a large download, or a slow package index")
            continue
        heard = now
        piece = os.read(descriptor, 65536)
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
        if not piece:
            yield rest.decode(errors="replace")
            return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.bootstrap", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--variant", choices=VARIANTS, default="cpu")
    parser.add_argument("--root", type=Path, required=True, help="the folder that holds the environments")
    parser.add_argument(
        "--extra", action="append", default=[], help="a further requirement set, such as test"
    )
    options = parser.parse_args(arguments)
    try:
        python = ensure_environment(
            options.root,
            options.variant,
            extras=options.extra,
            progress=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201 - a command's stderr
        )
    except BootstrapError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(python)  # noqa: T201 - the command's result
    return 0


if __name__ == "__main__":
    sys.exit(main())
