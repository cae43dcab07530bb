"""At staleness 0 the pool sends what the loop before it sent, byte for byte: ids, order, counts, place.

The digests are of the bodies that the loop with a barrier in each step sent, of the commit before the pool;
in "trouble" with another parse rate in the place of a validation: a run that crashed has not parsed.
"""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from tests.support import pretend_rollouts
from tests.support.pretend_rollouts import Twice, digests, train
from tests.support.small_run import SmallRun

CASES: dict[str, tuple[Any, type[dspy.Module] | None, dict[str, Any]]] = {
    "plain": (pretend_rollouts.plain, None, {}),
    "two predictors": (pretend_rollouts.plain, Twice, {"checkpoint": "none"}),
    "truncated": (
        pretend_rollouts.plain, Twice, {"variably_invoked_predictor_grouping_mode": "truncate"},
    ),
    "trouble": (pretend_rollouts.troubled, Twice, {"num_train_steps": 6}),
    "dynamic": (pretend_rollouts.mostly_flat, None, {"dynamic_sampling": True}),
    "dynamic, at its bound": (pretend_rollouts.mostly_flat, None, {"dynamic_sampling": 8}),
    "dynamic trouble": (pretend_rollouts.troubled, Twice, {"dynamic_sampling": 16}),
    "one thread": (pretend_rollouts.plain, None, {"num_threads": 1}),
    "a schedule": (
        pretend_rollouts.plain, None,
        {"train_kwargs": {"lr_scheduler_type": "cosine", "learning_rate": 1e-4}},
    ),
}  # fmt: skip
SENT: dict[str, list[str]] = {
    "plain": [
        "8866a07703816ca6",
        "371be38a8698fea9",
        "46a96783254a1d21",
        "78b539b12d35c2d8",
        "b04356a28a5ba3d5",
    ],
    "two predictors": [
        "5d315f17f61273b7",
        "f2c86ac4e6480463",
        "f3252e4750a36f4f",
        "4fd2235d196b52d8",
        "99eed487e3407020",
    ],
    "truncated": [
        "1fe41dec3be4eba2",
        "d560b990f1eae6bc",
        "38f2d76c613310b0",
        "5f718c0980e069ec",
        "44a484a695345387",
    ],
    "trouble": [
        "34849dde8da73383",
        "03f87a13aa231651",
        "ae8af9bee8e18910",
        "9ed2a1cc6af6888a",
        "41e43ceba2885d0b",
        "e54206411229d4fd",
    ],
    "dynamic": [
        "5829f0cb5d99cc21",
        "f59af5d49a469c91",
        "a53c3a8171c9ce1c",
        "2bf98ae623a5a310",
        "4117f1f3308516da",
    ],
    "dynamic, at its bound": [
        "e3382218395f6295",
        "4c2b13087466ceec",
        "aa985bc4134084c4",
        "47106f9d3e63cc15",
        "89eaa171856129e2",
    ],
    "dynamic trouble": [
        "99e3f88b04f8817f",
        "f407147e22b72df9",
        "ae8af9bee8e18910",
        "9ed2a1cc6af6888a",
        "cecad7f85be42063",
    ],
    "one thread": [
        "8866a07703816ca6",
        "371be38a8698fea9",
        "46a96783254a1d21",
        "78b539b12d35c2d8",
        "b04356a28a5ba3d5",
    ],
    "a schedule": [
        "c0422aca59252a2e",
        "9091ffd371b0e50b",
        "4ba5ec783567fc06",
        "87b4e3b24b85ef87",
        "70396baf64d86470",
    ],
}


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_c59_at_staleness_0_the_bodies_of_the_steps_are_those_of_the_loop_before(
    run: SmallRun, name: str
) -> None:
    run.answer, program, changes = CASES[name]
    run.drop_flat = True
    train(run, program and program(), **changes)
    assert digests(run) == SENT[name]
