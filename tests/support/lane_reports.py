"""A pytest plugin for a lane's own pytest: writes what was collected and each report as JSON lines to a file.

Loaded with `-p tests.support.lane_reports` in a child pytest; `lane.py` reads the file as it grows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE_VARIABLE = "SLIPWAY_LANE_REPORTS"


def pytest_configure(config: pytest.Config) -> None:
    """One writer for the session; what this process starts is not to write as well."""
    config.pluginmanager.register(_Writer(config, Path(os.environ.pop(FILE_VARIABLE))))


class _Writer:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say which cases will run: a test function may have several."""
        self._write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each phase, whole, as pytest itself puts it into words."""
        said = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(nodeid=report.nodeid, report=said)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """All phases of a case are over."""
        self._write(finished=nodeid)

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line, default=str) + "\n")
