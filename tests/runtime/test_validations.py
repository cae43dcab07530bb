"""Held-out scores at the gateway, each once over its restarts; and the reward of each predictor (A19)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.gateway.validations import Validations
from runtime.shared import validations
from runtime.shared.batch import Batch
from runtime.shared.rewards import reward_metrics
from runtime.shared.schema import Validation
from tests.runtime.gateway_process import Gateway

FIRST = {"compile": "c1", "step": 0, "score": 0.25, "standard_error": 0.1, "examples": 16}
LATER = {"compile": "c1", "step": 4, "score": 0.5, "predictors": {"draft": 0.75}, "version": 0}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    running = Gateway(tmp_path, None, tmp_path, train={"loss": "dapo"})
    yield running
    running.stop()


def say(gateway: Gateway, **body: Any) -> int:
    return gateway.http.post("/slipway/validations", json=body).status_code


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(it) for it in (folder / "validations.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a19_a_validation_is_kept_once_over_tries_and_lives(gateway: Gateway, tmp_path: Path) -> None:
    assert gateway.http.get("/slipway/validations").json() == []
    assert [say(gateway, **it) for it in (FIRST, FIRST, LATER)] == [204, 204, 204]
    gateway.kill()
    with (tmp_path / "validations.jsonl").open("a") as file:
        file.write('{"compile": "c1", "st')  # what a full disk has left
    gateway.start()
    assert [say(gateway, **it) for it in (LATER, {**FIRST, "name": "other"})] == [204, 204]
    found = gateway.http.get("/slipway/validations").json()
    assert found == lines(tmp_path)
    assert [(it["step"], it["name"], it["score"]) for it in found] == [
        (0, "score", 0.25),
        (4, "score", 0.5),
        (0, "other", 0.25),
    ]
    assert [it["version"] for it in found] == [0, 0, 0]
    assert found[0]["standard_error"] == 0.1 and found[1]["predictors"] == {"draft": 0.75}


@pytest.mark.slow
def test_a19_what_is_no_score_is_refused_and_the_status_says_how_steps_learn(gateway: Gateway) -> None:
    for bad in (
        {**FIRST, "score": None},
        {**FIRST, "step": -1},
        {**FIRST, "name": "a/b"},
        {**FIRST, "parse_rate": 2},
        {**FIRST, "surprise": 1},
        {"compile": "c1", "step": 1},
    ):
        assert say(gateway, **bad) == 400, bad
    body = b'{"compile": "c", "step": 1, "score": NaN}'
    answer = gateway.http.post(
        "/slipway/validations", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert gateway.http.get("/slipway/validations").json() == []
    said = gateway.status()["settings"]
    assert (said["loss"], said["overlong"], said["clip_high"]) == ("dapo", "mask", 0.28)
    assert "seed" not in said and "lora" not in said


def test_a19_what_was_scored_after_the_newest_step_went_with_its_machine(tmp_path: Path) -> None:
    kept = Validations(tmp_path, 4)
    for step in (0, 2, 4):
        kept.add(Validation(compile="c", step=step, score=step / 8, version=step), 9)
    again = Validations(tmp_path, 2)
    assert [it["step"] for it in again.list()] == [0, 2] == [it["step"] for it in lines(tmp_path)]
    again.add(Validation(compile="c", step=4, score=0.75, version=4), 4)
    again.add(Validation(compile="c", step=2, score=0.5, version=2), 4)
    # The newest word counts, in its place; the file has all of them, in the order they were said in.
    assert [(it["step"], it["score"]) for it in again.list()] == [(0, 0.0), (2, 0.5), (4, 0.75)]
    newest = {validations.key_of(it): it["score"] for it in validations.read(tmp_path / validations.FILE)}
    assert newest == {("c", 0, "score"): 0.0, ("c", 2, "score"): 0.5, ("c", 4, "score"): 0.75}


def a_batch(rewards: list[float], of_groups: list[int], **meta: Any) -> Batch:
    nothing = np.zeros(0)
    return Batch(
        *(nothing,) * 3,
        np.zeros(1, np.int64),
        *(nothing,) * 4,
        reward=np.asarray(rewards, np.float32),
        group=np.asarray(of_groups, np.int64),
        meta=meta,
    )


def test_a19_a_steps_metrics_have_each_predictors_mean_reward() -> None:
    groups = [{"id": "a", "predictor": "draft"}, {"id": "b", "predictor": None}]
    members = [
        {"predictor": None},
        {"predictor": "draft"},
        {"predictor": "judge"},
        {"predictor": None},
        {"predictor": "judge"},
    ]
    batch = a_batch([1.0, 0.0, 0.25, 0.5, float("nan")], [0, 0, 1, 1, 1], groups=groups, members=members)
    assert reward_metrics(batch) == {
        "reward": pytest.approx(0.4375),
        "reward_deviation": pytest.approx(float(np.std([1.0, 0.0, 0.25, 0.5]))),
        "reward/draft": 0.5,
        "reward/judge": 0.25,
    }
    assert set(reward_metrics(a_batch([1.0], [0]))) == {"reward", "reward_deviation"}
    assert reward_metrics(a_batch([float("nan")], [0])) == {}
