"""Which step the trainer takes next, and how often one may take the whole trainer with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.trainer.crash_counter import MAX_CRASHES, CrashCounter, TooManyCrashesError
from runtime.trainer.next_step import NextStep
from runtime.trainer.ranks import Ranks

ALONE = Ranks(0, 1, "cpu")
pytestmark = pytest.mark.quick


def given(steps: Path, *numbers: int) -> None:
    for number in numbers:
        (steps / f"{number:06d}").mkdir(parents=True)


def test_steps_are_taken_in_order_and_one_that_failed_is_passed_over(tmp_path: Path) -> None:
    given(tmp_path, 1, 2, 3)
    (tmp_path / "000002" / "failed.json").write_text("{}")
    found = NextStep(tmp_path, ALONE, follow=False, stopping=lambda: False)
    assert [found.after(last) for last in (0, 1, 3)] == [1, 3, None]


def test_a_live_run_is_waited_for_until_it_is_time_to_stop(tmp_path: Path) -> None:
    looks: list[int] = []

    def stopping() -> bool:
        looks.append(len(looks))
        if len(looks) == 3:
            given(tmp_path, 1)
        return len(looks) > 5

    found = NextStep(tmp_path, ALONE, follow=True, stopping=stopping)
    assert found.after(0) == 1
    assert found.after(1) is None


def test_a19_whoever_waits_for_a_step_looks_around_meanwhile(tmp_path: Path) -> None:
    looks: list[int] = []

    def look_around() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            given(tmp_path, 1)

    found = NextStep(tmp_path, ALONE, follow=True, stopping=lambda: False, on_idle=look_around)
    assert found.after(0) == 1
    assert len(looks) == 3


def test_g19_a_try_is_forgiven_who_is_stopped_but_not_where_another_process_may_have_died(
    tmp_path: Path,
) -> None:
    """torchrun sends SIGTERM to the others when one was killed, as for its memory."""
    path = tmp_path / "tries.json"
    path.write_text(json.dumps({"step": 7, "tries": MAX_CRASHES}))
    CrashCounter(path, Ranks(0, 2, "cpu")).on_sigterm()
    with pytest.raises(TooManyCrashesError):
        CrashCounter(path, ALONE).begin(7)
    CrashCounter(path, ALONE).on_sigterm()
    CrashCounter(path, ALONE).begin(7)
