"""What tests measured, one JSON object a line, shown at the end of a session: for tests/bench/RESULTS.md.

A test says it with `say`, in whatever environment it runs; `remote_items.py` hands over what a lane's tests
printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

_SAID = "measured: "
_LINES = pytest.StashKey[list[str]]()


def say(what: str, **figures: Any) -> None:
    """Print what was measured, as one line."""
    print(_SAID + json.dumps({"what": what, **figures}))


def keep(config: pytest.Config, reports: Iterable[pytest.TestReport]) -> None:
    """Remember what was measured in the tests that these reports are of."""
    said = [line for report in reports if report.when == "call" for line in report.capstdout.splitlines()]
    lines = [line.removeprefix(_SAID) for line in said if line.startswith(_SAID)]
    config.stash.setdefault(_LINES, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show them all."""
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("measured")
    for line in lines:
        terminalreporter.write_line(line)
