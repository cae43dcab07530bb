"""The lives of one program: what `launch`, and `launch --resume`, put around it, in one process of tests."""

from __future__ import annotations

import pytest

from launcher.client.dspy.compile_start import _compiles
from launcher.client.dspy.training_place import PROGRAM_VARIABLE

RUN = "slip-0a1b2c3d"


def begin_life(monkeypatch: pytest.MonkeyPatch, after_step: int = 0, run: str = RUN) -> None:
    """Be the program as `launch` starts it, for the first time or resumed after a step."""
    _compiles.clear()
    monkeypatch.setenv(PROGRAM_VARIABLE, f"{run}@{after_step}")


def be_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a program that the user has started by hand, on an endpoint that is held."""
    _compiles.clear()
    monkeypatch.delenv(PROGRAM_VARIABLE, raising=False)
