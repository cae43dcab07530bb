"""A pytest plugin for the runtime's environment: writes what was collected and each outcome as JSON lines.

Loaded with `-p tests.support.remote_report` in a child pytest; `remote_items` reads the lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest

DESCRIPTOR_VARIABLE = "SLIPWAY_REPORT_FD"


def function_of(nodeid: str) -> str:
    """The test function a node id belongs to: the id without its parameters."""
    return nodeid.split("[", 1)[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Say how many parametrized cases each test function has."""
    _send({"when": "collected", "cases": Counter(function_of(item.nodeid) for item in session.items)})


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Send each phase that says something: the call, and a set-up or tear-down that failed or skipped."""
    if report.when == "call" or not report.passed:
        _send(
            {"when": report.when, "nodeid": report.nodeid, "outcome": report.outcome, "text": _text(report)}
        )


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """Say that all phases of a case are over."""
    _send({"when": "finish", "nodeid": nodeid})


def _text(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return report.longreprtext + "".join(f"\n--- {title}\n{content}" for title, content in report.sections)


def _send(line: dict[str, object]) -> None:
    os.write(int(os.environ[DESCRIPTOR_VARIABLE]), (json.dumps(line) + "\n").encode())
