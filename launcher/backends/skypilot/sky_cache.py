"""A cache of SkyPilot's own wheel and price catalogs, for the next run.

Each run has a home of its own, which goes with it (`sky_home.py`); building the wheel takes 6 to 13 s of the
time before a machine is armed. The wheel is kept in our cache, by SkyPilot's version; catalogs stay where
SkyPilot itself keeps them, in the user's home. Neighbours: `cloud_machine.py` saves the files of a launch,
`prices.py` those it fetched. Knows nothing of their content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launcher.base.home import Home

CATALOGS = ".sky/catalogs"
_WHEELS = ".sky/wheels"
# SkyPilot rebuilds a wheel that is older than its package, whose folders change whenever Python compiles a
# module in them. The version is in the cache's path.
_YOUNGER_SECONDS = 86400.0


def populate(home: Path, user_home: Path, cache: Path | None = None) -> None:
    """Copy the cached files into a new home of SkyPilot's."""
    if (user_home / CATALOGS).is_dir() and not (home / CATALOGS).exists():
        shutil.copytree(user_home / CATALOGS, home / CATALOGS)
    if (home / _WHEELS).exists():
        return
    ours = _wheels(cache)
    if ours.is_dir():
        shutil.copytree(ours, home / _WHEELS)
        tomorrow = time.time() + _YOUNGER_SECONDS
        for path in (home / _WHEELS).rglob("*"):
            os.utime(path, (tomorrow, tomorrow))
    elif (user_home / _WHEELS).is_dir():
        # With its times, by which SkyPilot judges it.
        shutil.copytree(user_home / _WHEELS, home / _WHEELS)


def save(home: Path, user_home: Path, cache: Path | None = None) -> None:
    """Cache the wheel and catalogs that a launch in this home has made. A failure here fails nothing else."""
    try:
        _keep_wheel(home / _WHEELS, _wheels(cache))
        save_catalogs(home / CATALOGS, user_home / CATALOGS)
    except (OSError, shutil.Error):  # the next run builds and fetches again
        return


def _keep_wheel(built: Path, kept: Path) -> None:
    """Keep the wheel whole or not at all, because two runs may begin at once."""
    if kept.is_dir() or not any(built.glob("*/*.whl")):
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".keeping-", dir=kept.parent))
    try:
        shutil.copytree(built, aside / "wheels")
        (aside / "wheels").rename(kept)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def save_catalogs(fetched: Path, kept: Path, *, anew: bool = False) -> list[str]:
    """Put fetched catalogs where the user's are, whole files only. Those left alone because the user has made
    or changed them: their digest is not the one SkyPilot noted when it fetched them.

    `anew`: all of these were fetched now. Else an equal file stays, and stays as old as it is: where SkyPilot
    has no network it makes old ones look new.
    """
    own = []
    for file in sorted(fetched.glob("*/*/*.csv")):
        place = file.relative_to(fetched)
        target, stamp = kept / place, Path(place.parts[0], ".meta", *place.parts[1:-1], f"{place.name}.md5")
        if not _as_fetched(file, fetched / stamp):
            continue
        if target.exists() and not _as_fetched(target, kept / stamp):
            own.append(str(target))
        elif anew or not target.exists() or target.read_bytes() != file.read_bytes():
            _replace(fetched / stamp, kept / stamp)
            _replace(file, target)
    return own


def _as_fetched(file: Path, stamp: Path) -> bool:
    digest = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
    return stamp.exists() and stamp.read_text().strip() == digest


def _replace(source: Path, target: Path) -> None:
    """A whole file or the old one, as old as its source."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.slipway-{os.getpid()}")
    shutil.copy2(source, aside)
    aside.replace(target)


def _wheels(cache: Path | None) -> Path:
    try:
        number = version("skypilot")
    except PackageNotFoundError:
        number = "none"
    return (cache or Home.find().cache) / "skypilot" / number / "wheels"
