"""What users do to an optimizer, and what happens: the table reads as the documentation of it.

Its rows are in `tests/support/abuse_rows/`, a file for each thing users do it with; `row.py` there says what
a row's fields mean. Each is run for real against a small endpoint that speaks our routes.
"""

from __future__ import annotations

import inspect
import re
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import dspy
import pytest
from dspy.teleprompt import grpo as dspys

from launcher.client import GRPO, PolicyLM, connect
from launcher.client.wire import Patience
from tests.support import abuses as a
from tests.support.abuse_rows.data import DATA
from tests.support.abuse_rows.metrics import METRICS
from tests.support.abuse_rows.parameters import PARAMETERS
from tests.support.abuse_rows.parses import PARSES
from tests.support.abuse_rows.programs import PROGRAMS
from tests.support.abuse_rows.rewards import NOTHING_TO_LEARN
from tests.support.abuse_rows.row import Abuse, tagged_examples
from tests.support.abuse_rows.run import RUN
from tests.support.small_run import TOKEN, SmallRun

TABLE = {
    "a program that": PROGRAMS,
    "a program whose answers, adapter or demos:": PARSES,
    "a metric that": METRICS,
    "as data,": DATA,
    "rewards:": NOTHING_TO_LEARN,
    "a run that": RUN,
    "as parameter,": PARAMETERS,
}
ROWS = [pytest.param(row, id=f"{what} {row.did}") for what, rows in TABLE.items() for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("row", ROWS)
def test_abuse(row: Abuse, run: SmallRun, capfd: pytest.CaptureFixture[str]) -> None:
    run.answer = row.answer
    row.before(run)
    session = connect(run.base_url, TOKEN, Patience(answer_seconds=30.0, away_seconds=0.3))
    lm = row.configured(run) if row.configured else None
    grpo, error, said, began = None, None, "", time.monotonic()
    with dspy.context(lm=lm) if lm is not None else nullcontext():
        try:
            grpo = GRPO(row.metric, session=session, **{**DEFAULTS, **row.asked_for, **_adapter(row)})
            grpo.compile(
                row.program(), trainset=_data(row.trainset or tagged_examples), valset=_data(row.valset)
            )
        except Exception as raised:  # noqa: BLE001 - which one it is, is what the table says
            error, said = raised, str(raised)
    assert time.monotonic() - began < BOUND_SECONDS
    said += capfd.readouterr().err
    assert (error is None) == (row.exit == 0), error
    assert error is None or type(error) is row.error, repr(error)
    assert re.search(row.says, said), said
    if grpo is not None:
        _check_report(row, run, grpo)


# Many times what any row takes: each of them would go on for ever if it were not bounded.
BOUND_SECONDS = 240

DEFAULTS = {
    "num_train_steps": 1,
    "num_dspy_examples_per_grpo_step": 2,
    "num_rollouts_per_grpo_step": 4,
    "checkpoint": "none",
}


def _adapter(row: Abuse) -> dict[str, Any]:
    return {"adapter": row.adapter()} if row.adapter else {}


def _data(given: Any) -> Any:
    return given() if given is not None else None


def _check_report(row: Abuse, run: SmallRun, grpo: GRPO) -> None:
    report = grpo.report.to_dict()
    if row.outcomes is not None:
        assert report["outcomes"] == row.outcomes
    assert {name: report[name] for name in row.counts} == row.counts
    assert report["trained"] + sum(report["dropped"].values()) >= report["samples"]
    groups = [group for request in run.requests.values() for group in request.groups]
    if row.rewards is not None:
        assert {it.reward for group in groups for it in group.members} == row.rewards
    if row.predictors is not None:
        assert {group.predictor for group in groups} == row.predictors


ARBOR = (
    "metric train_kwargs adapter exclude_demos num_threads num_train_steps seed "
    "num_dspy_examples_per_grpo_step num_rollouts_per_grpo_step use_train_as_val num_steps_for_val "
    "report_train_scores failure_score format_failure_score variably_invoked_predictor_grouping_mode "
    "variably_invoked_predictor_fill_strategy checkpoint"
)


def test_every_parameter_of_dspys_and_arbors_optimizers_is_known_here() -> None:
    ours = set(inspect.signature(GRPO.__init__).parameters)
    assert set(inspect.signature(dspys.GRPO.__init__).parameters) <= ours
    assert set(ARBOR.split()) <= ours


@pytest.mark.process
def test_the_student_may_be_named_as_its_own_teacher_and_nobody_else(run: SmallRun) -> None:
    run.answer = a.varied
    for teacher in (None, [], "itself", ["itself"]):
        student = a.predict()
        named = [student] if teacher == ["itself"] else student if teacher == "itself" else teacher
        GRPO(a.length, **DEFAULTS).compile(student, tagged_examples(), named)
    with pytest.raises(ValueError, match="it takes no teacher"):
        GRPO(a.length, **DEFAULTS).compile(a.predict(), tagged_examples(), [a.predict()])


def test_a_program_that_asks_another_run_is_refused(run: SmallRun) -> None:
    other = SmallRun()
    student = a.predict()
    student.set_lm(PolicyLM(other.session()))
    with pytest.raises(ValueError, match="but the optimizer trains the run at"):
        GRPO(a.length, **DEFAULTS).compile(student, tagged_examples())
    other.close()


def test_the_table_is_long_and_has_no_row_twice() -> None:
    ids = Counter(str(row.id) for row in ROWS)
    assert max(ids.values()) == 1
    assert len(ROWS) >= 119
