"""For tests of Arbor's names: a process in which nothing of them has been used yet."""

from __future__ import annotations

import pytest
from dspy.dsp.utils.settings import main_thread_config

from launcher.client.arbor import jobs, server, stderr_log


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was initialised, nothing was said, no job is known; what a test leaves there goes with it."""
    monkeypatch.setattr(server, "_session", None)
    monkeypatch.setattr(server, "_info", None)
    monkeypatch.setattr(stderr_log, "_logged", set())
    monkeypatch.setattr(jobs, "_jobs", {})
    monkeypatch.setitem(main_thread_config, "callbacks", [])
    # Without a network LiteLLM would wait for its price list.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
