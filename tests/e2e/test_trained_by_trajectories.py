"""Trajectories gathered, judged and trained on a real engine and trainer, in the shared run (B10)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat.chat_completion import Choice

from launcher.client import (
    Session,
    Trajectory,
    TrajectoryGroup,
    connect,
    gather_ahead,
    gather_trajectory_groups,
    group,
)
from launcher.client.trajectories.ahead import StepGroups
from launcher.client.trajectories.members import OTHER_MODEL
from launcher.client.trajectories.results import StepResult
from launcher.client.trajectories.trajectory_group import PendingGroup
from runtime.tiny.chat import messages, parse
from runtime.tiny.grammar import training_phrases
from tests.support.launched import Launched

pytestmark = pytest.mark.slow

STEPS = 2
PHRASES = training_phrases(2)
ROLLOUTS = 4
OTHER = Choice.model_validate(
    {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "Well said."}}
)


@pytest.fixture(scope="module")
def run(pupil: Launched) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_HOME", str(pupil.home))
        yield connect("shared")


async def rollout(client: AsyncOpenAI, place: int, name: int) -> Trajectory:
    """Two turns, the second sent with the first. One rollout fails, and one has a judge's turn too."""
    if (place, name) == (0, 0):
        raise TimeoutError("a tool")
    made = Trajectory(messages_and_choices=messages("english", "french", PHRASES[place].english))
    for _ in range(2):
        answered = await client.chat.completions.create(
            model="policy",
            messages=made.messages(),
            max_tokens=24,
            temperature=1.0,  # type: ignore[arg-type]
        )
        again = {"role": "user", "content": "[[ ## english ## ]]\nthe black cat"}
        made.messages_and_choices += [answered.choices[0], again]
    made.messages_and_choices += [OTHER] if name == 1 else []
    made.metadata["place"] = name
    return made.finish()


async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
    """There is something to learn in every group."""
    for place, one in enumerate(group):
        said = parse("french", one.messages_and_choices[2].message.content or "")
        one.reward = (said in [it.french for it in PHRASES]) - 0.1 * place
    return group


async def gather(run: Session) -> list[TrajectoryGroup]:
    client = AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, timeout=600, max_retries=0)
    async with client:
        return await gather_trajectory_groups(
            (TrajectoryGroup(rollout(client, place, name) for name in range(ROLLOUTS)) for place in range(2)),
            pbar_desc=None, max_exceptions=1, after_each=judge,
        )  # fmt: skip


def test_b10_two_steps_of_gathered_trajectories_with_every_answer_counted(run: Session) -> None:
    before = run.settle()
    home = run.run_dir
    assert home is not None
    for number in range(STEPS):
        groups = asyncio.run(gather(run))
        assert [(len(it), len(it.exceptions)) for it in groups] == [(3, 1), (4, 0)]
        result = run.train(groups, learning_rate=1e-6, state={"trajectories": number + 1})
        assert result.step == result.version == before.step + number + 1 == run.version
        assert result.dropped.pop("raised TimeoutError") == 1
        assert result.dropped.pop(OTHER_MODEL) == 2
        assert result.trained + sum(result.dropped.values()) == 2 * 7
        assert result.trained > 0
        # The second turn of each of the 7 goes on from the first, or begins a sequence of its own.
        assert 7 - sum(result.dropped.values()) <= result.joined + result.sealed <= 7
        assert result.metrics["learning_rate"] == pytest.approx(1e-6)
        assert run.train(groups, learning_rate=1e-6, state={"trajectories": number + 1}).step == result.step
        run.log(groups, split="train", metrics=result.metrics, step=result.step)
    assert run.read_state()["trajectories"] == STEPS
    done = run.log(groups)
    assert (done.folder, done.line["step"]) == (home, before.step + STEPS - 1), "of the policy that was asked"
    lines = [json.loads(line) for line in (home / "history.jsonl").read_text().splitlines()]
    assert [(it["split"], it["step"] - before.step) for it in lines[-3:]] == [
        ("train", 1),
        ("train", 2),
        ("val", 1),
    ]


def test_r07_answers_held_to_a_schema_train_as_the_engine_sampled_them(run: Session) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    before, names = run.settle().step, [run.new_rollout() for _ in range(4)]
    for name in names:
        with OpenAI(base_url=run.rollout_url(name), api_key=run.api_key, timeout=600) as client:
            answer = client.chat.completions.with_raw_response.create(
                model="policy", messages=[{"role": "user", "content": "a"}], max_tokens=16,
                response_format=form,  # type: ignore[arg-type]
            )  # fmt: skip
        assert "x-slipway-untrainable" not in answer.headers
    result = run.step([group("held", {name: float(place) for place, name in enumerate(names)})])
    assert result.counts.trained == len(names) and not result.counts.dropped
    (line,) = run.metrics(after=before)
    # The engine samples one of a few tokens there: without the mask the trainer's ratios are far from 1.
    assert line["metrics"]["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert line["metrics"]["ratio_max"] < 1.01


def test_c39_three_steps_rolled_out_ahead_with_the_versions_that_answered_as_recorded(
    run: Session, pupil: Launched
) -> None:
    """With staleness 1 what step 2 trains began before step 1 was committed, and nothing is older."""
    before = run.settle().version
    # Of each group how many steps were done as it began.
    done_at: list[int] = []
    steps: list[StepGroups] = []
    results: list[StepResult] = []

    def scenarios(client: AsyncOpenAI) -> Iterator[PendingGroup]:
        while True:
            done_at.append(len(results))
            yield TrajectoryGroup(rollout(client, 1, name) for name in range(ROLLOUTS))

    async def work() -> None:
        async with AsyncOpenAI(
            base_url=run.base_url, api_key=run.api_key, timeout=600, max_retries=0
        ) as client:
            async for groups in gather_ahead(
                run, scenarios(client), per_step=2, steps=3, staleness=1, after_each=judge, pbar_desc=None
            ):
                steps.append(groups)
                state = {"ahead": groups.place}
                results.append(await run.train_async(groups, learning_rate=1e-6, state=state))

    asyncio.run(work())
    assert [it.version for it in results] == [before + 1, before + 2, before + 3] and len(done_at) == 6
    assert run.read_state()["ahead"] == steps[-1].place == {"steps": 3, "next": 6, "again": []}
    for number, (groups, result) in enumerate(zip(steps, results, strict=True)):
        # A newer run may be beside it.
        folder = pupil.home / "runs" / run.run_id / "machine" / "steps" / f"{result.step:06d}"
        batch = json.loads((folder / "batch.json").read_text())
        trained = [turn["version"] for sample in batch["samples"] for turn in sample["turns"]]
        lags = Counter(before + number - version for version in trained)
        assert set(lags) <= {0, 1} and lags <= Counter(groups.lags)
        assert lags.total() == result.trained > 0
        choices = sum(groups.lags.values()) + result.dropped[OTHER_MODEL]
        assert choices == result.trained + sum(result.dropped.values())
        assert all(number - done_at[it] <= 1 for it in groups.numbers)
    assert min(done_at[it] for it in steps[1].numbers) == 0 and steps[1].lags[1] > 0
