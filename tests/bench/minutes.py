"""Where the minutes of the tests are: each phase and fixture, with what the computer computed meanwhile.

    SLIPWAY_MINUTES=/tmp/minutes.jsonl PYTEST_ADDOPTS="-p tests.bench.minutes" uv run pytest
    python -m tests.bench.minutes /tmp/minutes.jsonl           the files and the slowest tests, as tables

The processor's seconds are those of the whole computer: alone on it, they tell computing from waiting. Lanes
and nested pytests write to the same file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_VARIABLE = "SLIPWAY_MINUTES"
# Shorter fixtures are not worth a line.
_SHORT_SECONDS = 0.05
_SLOWEST = 20


class _Span:
    """One stretch of time, written when it is over."""

    def __init__(self, kind: str, name: str) -> None:
        self._line: dict[str, Any] = {
            "kind": kind,
            "name": name,
            "process": os.getpid(),
            "start": time.time(),
        }
        self._busy = _busy_seconds()

    def write(self, at_least_seconds: float = 0.0) -> None:
        seconds = time.time() - self._line["start"]
        if seconds >= at_least_seconds:
            line = self._line | {"seconds": seconds, "busy_seconds": _busy_seconds() - self._busy}
            with open(os.environ[_VARIABLE], "a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


def _busy_seconds() -> float:
    """What all cores have computed since the computer started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle, waiting_for_disk = ticks[3], ticks[4]
    return (sum(ticks) - idle - waiting_for_disk) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    span = _Span("fixture", f"{fixturedef.baseid}::{fixturedef.argname}")
    try:
        return (yield)
    finally:
        span.write(_SHORT_SECONDS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _phase("setup", item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _phase("call", item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _phase("teardown", item))


def _phase(kind: str, item: pytest.Item) -> Generator[None, object, object]:
    span = _Span(kind, item.nodeid)
    try:
        return (yield)
    finally:
        span.write()


def _main(path: Path) -> None:
    """The tables: of each file and of the slowest tests."""
    files: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    tests: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in map(json.loads, path.open(encoding="utf-8")):
        if line["kind"] != "fixture":
            for into in (files[line["name"].partition("::")[0]], tests[line["name"]]):
                into[0] += line["seconds"]
                into[1] += line["busy_seconds"]
    for title, found, most in (("file", files, len(files)), ("test", tests, _SLOWEST)):
        print(f"| {title} | seconds | processor seconds |\n|---|---|---|")
        for name, (seconds, busy) in sorted(found.items(), key=lambda one: -one[1][0])[:most]:
            print(f"| {name} | {seconds:.1f} | {busy:.1f} |")
        print()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
