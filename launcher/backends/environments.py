"""The built environments on this computer: tells whether one is complete, can be built now, or can be
removed.

Neighbours: `runtime/bootstrap.py` builds them; `preflight.py`, `doctor.py` and `teardown/leftovers.py` ask
here. Installs nothing. Knows nothing of runs.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.bootstrap import (
    MARKER,
    REQUIREMENTS,
    UNSET_FOR_UV,
    VARIANTS,
    Environment,
    find_links,
    find_uv,
    holds_cpu_torch,
)

# How long one look at the package index may take: a slow one still answers.
INDEX_SECONDS = 20.0
NO_ANSWER = "the package index did not answer"
_NAME = re.compile(r"(?P<sets>.+)-py(?P<version>\d+\.\d+)-[0-9a-f]{12}")


def missing_packages(root: Path, variant: str = "cpu", extras: Sequence[str] = ()) -> list[str]:
    """The pinned packages that are missing in a built environment, by its own folders."""
    environment = Environment(root.absolute(), variant, tuple(extras))
    installed = {
        _canonical(path.name.removesuffix(".dist-info"))
        for path in environment.folder.glob("lib/python*/site-packages/*.dist-info")
        if (path / "METADATA").is_file()
    }
    pins = [pin for path in environment.lock_files for pin in _pins(path)]
    return [pin for pin in pins if _canonical(pin.replace("==", "-")) not in installed]


def _pins(lock: Path) -> list[str]:
    """The pins of a lock file that hold for every machine: a pin with a marker may be for another one."""
    return [line.strip() for line in lock.read_text().splitlines() if line.strip() and ";" not in line]


def _canonical(name_and_version: str) -> str:
    name, _, version = name_and_version.rpartition("-")
    return re.sub(r"[-_.]+", "-", name).lower() + "==" + version


# ------------------------------------------------------------------ the package index


def why_unreachable(
    variant: str = "cpu",
    *,
    requirements: Path = REQUIREMENTS,
    environ: Mapping[str, str] | None = None,
    bound_seconds: float = INDEX_SECONDS,
) -> str | None:
    """The reason an environment could not be built now because packages cannot be had; None if it could.
    Bounded.

    Asks uv itself, as configured here, for one pinned package and for torch. If the index does not answer, it
    asks whether all of them are in uv's cache. Raises BootstrapError without uv.
    """
    environ = dict(os.environ if environ is None else environ)
    lock = requirements / f"{variant}.txt"
    places = find_links(environ)
    pins = _pins(lock)[:1]
    options = [word for place in places for word in ("--find-links", place)]
    if not any("://" in place for place in places) and not holds_cpu_torch(places, lock):
        pins += [pin for pin in _pins(lock) if pin.startswith("torch==")]
        options += ["--torch-backend", "cpu"]
    # Its own patience ends after ours, so that silence has one name.
    impatient = environ | {"UV_HTTP_TIMEOUT": str(int(bound_seconds) + 2), "UV_HTTP_RETRIES": "0"}
    trouble = _dry_run([*pins, *options], impatient, bound_seconds)
    if trouble is None:
        return None
    in_cache = _dry_run(["--offline", "-r", str(lock), *options], environ, bound_seconds) is None
    return None if in_cache else trouble


def _dry_run(words: list[str], environ: Mapping[str, str], bound_seconds: float) -> str | None:
    """uv's error from a dry-run install; None if the install would work."""
    with tempfile.TemporaryDirectory(prefix="slipway-look-") as folder:
        command = [find_uv(), "pip", "install", "--dry-run", "--no-deps", "--python", sys.executable]
        try:
            done = subprocess.run(
                [*command, "--target", f"{folder}/nothing", *words],
                cwd=folder,
                env={key: value for key, value in environ.items() if key not in UNSET_FOR_UV},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=bound_seconds,
            )
        except subprocess.TimeoutExpired:
            return f"{NO_ANSWER} in {bound_seconds:g} s"
    return None if done.returncode == 0 else _error_line(done.stderr)


def _error_line(output: str) -> str:
    """The line of uv's output that names the problem."""
    lines = [re.sub(r"^\W*((error|cause|Caused by): )?", "", line) for line in output.splitlines()]
    told = [line for line in lines if line and not line.startswith(("Using ", "warning"))]
    reasons = [line for line in told if "fetch" in line.lower() or line.startswith("Because")]
    return (reasons or told or ["uv printed nothing"])[0]


# ------------------------------------------------------------------ environments to remove


def incomplete(root: Path) -> list[Path]:
    """The unfinished folders of killed builders: no process holds their locks."""
    found = sorted(root.glob(".*.building-*"))
    return [path for path in found if not _being_built(root, path.name[1:].rpartition(".building-")[0])]


def outdated(root: Path) -> list[Path]:
    """Complete environments of this Python that this version would no longer use."""
    version = ".".join(map(str, sys.version_info[:2]))
    current = _current_names(root)
    matches = [(path, _NAME.fullmatch(path.name)) for path in sorted(root.glob("*-py*-*"))]
    return [
        path
        for path, match in matches
        if match and match["version"] == version and path.name not in current and (path / MARKER).is_file()
    ]


def _current_names(root: Path) -> set[str]:
    """The names of all environments that this version could ask for."""
    extras = [path.stem for path in REQUIREMENTS.glob("*.in") if path.stem not in VARIANTS]
    chosen = [some for count in range(len(extras) + 1) for some in itertools.permutations(extras, count)]
    return {Environment(root, variant, some).name for variant in VARIANTS for some in chosen}


def last_used(environment: Path) -> float:
    """The time of an environment's last use, in seconds since the epoch."""
    return (environment / MARKER).stat().st_mtime


def remove(folder: Path) -> None:
    """Remove an environment or its remains. No other process ever sees half of it."""
    aside = folder
    if not folder.name.startswith("."):
        aside = folder.with_name(f".{folder.name}.building-{os.getpid()}")
        folder.rename(aside)
    shutil.rmtree(aside)


def _being_built(root: Path, name: str) -> bool:
    try:
        descriptor = os.open(root / f".{name}.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
