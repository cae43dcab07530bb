"""Failpoints: what they are made of, that they act once, and that they cost nothing unarmed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.failpoints import Failpoint, FailpointError, Failpoints, parse

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_text_says_names_counts_and_actions() -> None:
    assert parse("") == ()
    assert parse("a.b:kill9, c@3:raise") == (Failpoint("a.b", "kill9"), Failpoint("c", "raise", 3))


@pytest.mark.parametrize("text", ["a", "a:", ":kill9", "a:kill", "a@x:raise", "a@:b:c"])
def test_what_is_no_failpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no failpoint"):
        parse(text)


def test_it_acts_at_its_count_and_at_no_other_name() -> None:
    points = Failpoints("here@2:raise")
    for name in ("there", "here", "there"):
        points.passing(name)
    with pytest.raises(FailpointError, match="here"):
        points.passing("here")
    points.passing("here")
    assert points.armed and not Failpoints("").armed


def test_a_full_disk_is_an_os_error() -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        Failpoints("here:full").passing("here")
    assert raised.value.errno == errno.ENOSPC


def test_a_file_arms_a_process_that_runs_and_acts_once(tmp_path: Path) -> None:
    file = tmp_path / "armed"
    first, second = Failpoints(f"file:{file}"), Failpoints(f"file:{file}")
    first.passing("here")
    file.write_text("here:raise")
    second.passing("there")
    with pytest.raises(FailpointError):
        first.passing("here")
    second.passing("here")
    assert not file.exists()
    file.write_text("here:raise")  # armed again
    with pytest.raises(FailpointError):
        second.passing("here")


@pytest.mark.parametrize(("action", "code"), [("kill9", -9), ("term", -15), ("segv", -11), ("raise", 1)])
def test_the_variable_arms_a_process_from_its_start(action: str, code: int) -> None:
    program = "from runtime import failpoints; failpoints.passing('here')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "SLIPWAY_FAILPOINT": f"here:{action}"},
        capture_output=True,
    )
    assert done.returncode == code
