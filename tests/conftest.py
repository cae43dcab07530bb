"""Every test runs in a home of its own; the runtime's tests run in the runtime's environment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import remote_items


def pytest_configure(config: pytest.Config) -> None:
    """Started in the background or under nohup, signals are ignored, and `launch` would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Hand `tests/runtime` to the collector that knows its environment."""
    if path == remote_items.FOLDER:
        return remote_items.RemoteFolder.from_parent(parent, path=path)
    return None


def pytest_runtestloop(session: pytest.Session) -> None:
    """Both environments work at once where their tests allow it."""
    if not session.config.option.collectonly:
        remote_items.start_early(session)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no child behind."""
    remote_items.end_child(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is too long for every run is slow as well: `-m "not slow"` takes the place of the default."""
    for item in items:
        if item.get_closest_marker("long") or item.get_closest_marker("matrix"):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """In CI a skip is a failure: a part that is missing there was not tested at all."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
