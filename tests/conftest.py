"""Every test runs in a home of its own; lanes run beside each other, the runtime's in its environment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.lane import in_a_lane

pytest_plugins = ["tests.support.measured", "tests.support.lanes", "tests.support.remote_items"]
_ONLY_SLOW = {Path(__file__).with_name(name) for name in ("cloud", "e2e", "gpu", "mutations")}


def pytest_configure(config: pytest.Config) -> None:
    """What the processes of the tests inherit from here."""
    # Started in the background or under nohup, signals are ignored, and `launch` would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Where it is set, each process that is started would compile its imports again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is quick is found without reading the folders that have none of it."""
    return True if config.option.markexpr == "quick" and collection_path in _ONLY_SLOW else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is too long for every run is slow as well: `-m "not slow"` takes the place of the default.

    What has no mark that says it takes its time is quick. What needs a GPU is left out, whatever else is
    asked for, until it is asked for by name.
    """
    for item in items:
        if any(item.get_closest_marker(mark) for mark in ("long", "matrix", "gpu")):
            item.add_marker("slow")
        if not (item.get_closest_marker("slow") or item.get_closest_marker("process")):
            item.add_marker("quick")
    if "gpu" not in config.option.markexpr and not in_a_lane():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """In CI a skip is a failure: a part that is missing there was not tested at all."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
