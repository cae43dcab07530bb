"""started_run.py, holder.py, run_lookup.py: a run that a Python process starts, and what ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from launcher.client import connect, run_lookup, start
from launcher.client.failures import ClientError, NotConnected
from launcher.client.holder import DONE
from tests.support.waiting import wait_until

# In launch's place: says on what it ended.
_LAUNCH = """
import pathlib, signal, sys
said = pathlib.Path(sys.argv[1])
def term(*_):
    said.write_text("term")
    sys.exit(143)
signal.signal(signal.SIGTERM, term)
said.write_text("begun")
sys.stdin.read()
said.write_text("input ended")
"""


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": "H100:1"},
        {"gpus": "H100:1", "max": "2h"},
        {"gpus": "H100:1", "yes": True},
        {"options": ["--gpus", "H100:1"], "yes": True, "max": "1h"},
        {"options": ["--infra=aws"]},
        {"options": ["-y"]},
    ],
)
def test_b19_nothing_is_rented_from_python_without_a_word_and_a_bound(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(ClientError) as caught:
        start(**given)
    assert caught.value.exit_code == 2 and caught.value.hint


@pytest.mark.process
def test_b19_a_run_that_cannot_start_says_so_in_launchs_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_HOME", str(tmp_path))
    with pytest.raises(NotConnected, match=r"no model \./nowhere") as caught:
        start(model="./nowhere", quiet=True)
    assert caught.value.hint and caught.value.hint.startswith("launch --model")
    with pytest.raises(NotConnected, match="no run 'nobody'"):
        connect("nobody")


@pytest.mark.process
def test_b07_a_python_without_launch_is_told_how_to_find_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the environment of an agent or of ART, where our client is and what `launch` needs is not."""
    monkeypatch.setattr(run_lookup, "LAUNCH_COMMAND", (sys.executable, "-S", "-P", "-m", "launcher.cli.main"))
    with pytest.raises(NotConnected, match="cannot ask `launch` for the run 'dev'") as caught:
        connect("dev")
    assert caught.value.hint and caught.value.hint.startswith('eval "$(launch env dev)"')


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "on", "code"), [("done", "input ended", 0), ("gone", "term", 143), ("killed", "input ended", -9)]
)
def test_b19_a_run_ends_with_its_python_and_with_its_holder(
    tmp_path: Path, end: str, on: str, code: int
) -> None:
    """In order where it is asked for, by a TERM where the process is gone, by its input where nobody is."""
    said, script = tmp_path / "said", tmp_path / "launch.py"
    script.write_text(textwrap.dedent(_LAUNCH))
    theirs, ours = os.pipe()
    command = [sys.executable, str(script), str(said)]
    holder = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.client.holder", "--pipe", str(theirs), "--", *command],
        pass_fds=(theirs,), start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        wait_until(lambda: said.exists() and said.read_text() == "begun", 60, "launch has begun")
        if end == "done":
            os.write(ours, DONE)
        if end == "killed":
            holder.kill()
    finally:
        os.close(ours)
        assert holder.wait(60) == code
    wait_until(lambda: said.read_text() == on, 60, f"launch ended on: {on}")
