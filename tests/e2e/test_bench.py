"""`launch bench` from outside: a short form, and the comparison with TRL.

What is measured in a short form on a busy computer is no figure; that it is measured, and what becomes of
what was started, is what is tested here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import Launched, processes_of

pytestmark = pytest.mark.slow

SECONDS = 1200.0


def bench(home: Path, *words: str) -> dict[str, Any]:
    """What it found."""
    return found_by(Launched(home, ["bench", "--json", *words]))


def found_by(launched: Launched) -> dict[str, Any]:
    try:
        assert launched.wait(SECONDS) == 0, launched.stdout + launched.stderr
    finally:
        launched.kill_tree()
    *_, found = launched.events  # behind what was said meanwhile
    return found


@pytest.mark.long
def test_a_short_form_measures_each_line_and_leaves_nothing(home: Path) -> None:
    found = bench(home, "--steps", "1")
    lines = {line["what"]: line for line in found["lines"]}
    assert len(lines) == 9
    # A difference of two medians may be any number on a busy computer, as may a rise.
    differences = {"gateway's own latency, p50", "held-out rise, of the range"}
    assert all(line["seen"] > 0 for what, line in lines.items() if what not in differences), lines
    (run,) = found["runs"]
    assert run["start_seconds"] > 0 and run["end_seconds"] > 0 and len(run["rewards"]) == 1
    assert set(run["measured"]["requests"]["p50_ms"]) == {"direct", "gateway", "door"}
    assert "1 steps, not 40" in found["no_record_because"]
    (folder,) = (Path(run["folder"]) / "home" / "runs").glob("slip-*")
    assert json.loads((folder / "record.json").read_text())["proof"]["verified"]
    assert not processes_of(folder.name)
    assert json.loads((Path(found["folder"]) / "bench.json").read_text())["lines"] == found["lines"]


@pytest.mark.long
def test_both_sides_learn_the_same_task_by_turns(home: Path) -> None:
    words = ("-m", "tests.bench.against_trl", "--json", "--steps", "10", "--seeds", "2")
    found = found_by(Launched(home, words, executable=[sys.executable]))
    assert [run["side"] for run in found["runs"]] == ["ours", "trl", "trl", "ours"]
    for run in found["runs"]:
        assert len(run["step_seconds"]) == 10 and run["scores"][-1] > run["scores"][0]
    assert all(line["ratio"] for line in found["lines"])
