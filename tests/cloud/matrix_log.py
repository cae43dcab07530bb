"""The log of the kill matrix: a line for each case that passed; for the same code it is not run again.

python -m tests.cloud.matrix_log      as the table that tests/bench/RESULTS.md has
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import time
from pathlib import Path

import platformdirs
import pytest

from tests.cloud.matrix import Ended
from tests.cloud.rig import REPOSITORY

LOG_VARIABLE = "SLIPWAY_MATRIX_LOG"


@functools.cache
def _code() -> str:
    """Everything that runs on either side, as it is in this tree."""
    digest = hashlib.sha256()
    for half in ("launcher", "runtime", "sky"):
        for path in sorted((REPOSITORY / half).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _log() -> Path:
    named = os.environ.get(LOG_VARIABLE)
    cache = Path(platformdirs.user_cache_dir("slipway-tests", appauthor=False))
    return Path(named) if named else cache / "matrix.jsonl"


def skip_when_seen(name: str) -> None:
    """Skip the test where this case has passed with this code."""
    lines = _log().read_text().splitlines() if _log().exists() else []
    for seen in map(json.loads, lines):
        if (seen["case"], seen["code"]) == (name, _code()):
            pytest.skip(f"seen at {seen['date']}, commit {seen['commit']}")


def note(name: str, ended: Ended, begun: float) -> None:
    """A case passed; `begun` on the monotonic clock."""
    commit = ["git", "rev-parse", "--short", "HEAD"]
    ended_by = ended.record["ended_by"] or "nobody: nothing was started"
    line = {
        "case": name,
        "happened": f"exit {ended.code}, ended by {ended_by}",
        "machines_made": ended.machines_made,
        "proof": (ended.record["proof"] or {}).get("detail"),
        "gone_seconds": round(ended.gone_seconds, 1),
        "verified_seconds": round(ended.verified_seconds, 1),
        "case_seconds": round(time.monotonic() - begun, 1),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": subprocess.run(commit, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip(),
        "code": _code(),
    }
    _log().parent.mkdir(parents=True, exist_ok=True)
    with _log().open("a") as log:
        log.write(json.dumps(line) + "\n")
    print(line)


def table() -> str:
    """The newest line of each case, as tests/bench/RESULTS.md has them."""
    newest = {line["case"]: line for line in map(json.loads, _log().read_text().splitlines())}
    rows = [
        f"| {one['case']} | {one['happened']} | {one['gone_seconds']} | {one['verified_seconds']} "
        f"| {one['case_seconds']} | {one['date'][11:16]} | {one['commit']} |"
        for one in newest.values()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
