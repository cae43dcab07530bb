"""What SkyPilot built for one run is there for the next: real SkyPilot builds its wheel here, once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends.skypilot import sky_cache

_BUILD = "from sky.backends import wheel_utils; print(wheel_utils.build_sky_wheel()[1])"


def _built(home: Path) -> tuple[str, dict[Path, int]]:
    """The wheel's hash as SkyPilot says it in this home, and its files there."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD],
        env={"HOME": str(home), "PATH": os.environ["PATH"], "TMPDIR": str(home)},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wheels = home / ".sky" / "wheels"
    return done.stdout.split()[-1], {path: path.stat().st_ino for path in wheels.glob("*/*.whl")}


@pytest.mark.slow
def test_a_wheel_that_one_run_built_is_not_built_again_for_the_next(tmp_path: Path) -> None:
    one, next_one, user, cache = (tmp_path / name for name in ("one", "next", "user", "cache"))
    one.mkdir()
    digest, _ = _built(one)
    sky_cache.save(one, user, cache)
    sky_cache.save(one, user, cache)
    next_one.mkdir()
    sky_cache.populate(next_one, user, cache)
    (furnished,) = (next_one / ".sky" / "wheels").glob("*/*.whl")
    before = furnished.stat().st_ino
    assert _built(next_one) == (digest, {furnished: before})


def test_a_users_own_wheel_is_taken_where_none_was_kept_and_trouble_is_no_failure(tmp_path: Path) -> None:
    home, user, cache = tmp_path / "home", tmp_path / "user", tmp_path / "cache"
    wheel = user / ".sky" / "wheels" / "0123" / "skypilot.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_text("a wheel")
    os.utime(wheel, (1000, 1000))
    home.mkdir()
    sky_cache.populate(home, user, cache)
    taken = home / ".sky" / "wheels" / "0123" / "skypilot.whl"
    assert (taken.read_text(), taken.stat().st_mtime) == ("a wheel", 1000)
    cache.write_text("in the way")
    sky_cache.save(home, user, cache)
    assert cache.read_text() == "in the way"
    assert list((user / ".sky").iterdir()) == [user / ".sky" / "wheels"]


def test_an_old_catalog_that_was_made_to_look_new_keeps_its_age(tmp_path: Path) -> None:
    fetched, kept = tmp_path / "fetched", tmp_path / "kept"
    for folder, text in ((fetched, "new"), (kept, "old")):
        _catalog(folder, text)
    assert sky_cache.save_catalogs(fetched, kept) == []
    prices = kept / "v8" / "aws" / "vms.csv"
    assert prices.read_text() == "new"
    os.utime(prices, (1000, 1000))
    sky_cache.save_catalogs(fetched, kept)
    assert prices.stat().st_mtime == 1000
    sky_cache.save_catalogs(fetched, kept, anew=True)
    assert prices.stat().st_mtime > 1000
    assert not list(kept.rglob("*.slipway-*"))


def _catalog(folder: Path, text: str) -> None:
    """A file as SkyPilot fetches it, with its digest."""
    file, stamp = folder / "v8" / "aws" / "vms.csv", folder / "v8" / ".meta" / "aws" / "vms.csv.md5"
    for path in (file, stamp):
        path.parent.mkdir(parents=True)
    file.write_text(text)
    stamp.write_text(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest())
