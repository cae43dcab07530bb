"""What `launch` says of a run while its program works (launcher/work.py)."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.output import Output
from launcher.pulse import Beat
from launcher.safety.lease import Lease, Limits
from launcher.work import Watched, Work
from runtime.schema import RuntimeStatus

pytestmark = pytest.mark.process

TROUBLE = "step 7 is committed, but not published: policy@v7: engine-0: 4 tensors differ from the file"


def status(phase: str, detail: str | None = None, version: int = 6) -> RuntimeStatus:
    said = {"run_id": "r", "model": "m", "served_name": "policy", "version": version, "step": version}
    return RuntimeStatus.model_validate(said | {"phase": phase, "detail": detail})


def test_a_publication_that_failed_is_said_once_in_the_terminal_and_so_is_its_end() -> None:
    said = io.StringIO()
    watched = SimpleNamespace(label="x", begun_at=0.0, limits=Limits(0.0), budget=None, pulse=None)
    work = Work(cast(Watched, watched), None, "", Output(stdout=said, stderr=said, environ={}))
    beats = [
        status("ready"),
        status("degraded", TROUBLE),
        status("degraded", TROUBLE),
        status("ready", None, 8),
    ]
    lines: list[Any] = []
    for one in beats:
        beat = Beat(Lease(60, 0), status=one)
        work._say_detail(beat)
        lines.append(work._live(beat, 1.0).trouble)
    assert said.getvalue().splitlines() == [TROUBLE, "the newest step is served again"]
    assert lines == [None, "the newest step is not served", "the newest step is not served", None]
