"""What is written down of a step for people: true, bounded, without secrets, and never in a step's way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.rollout_log import RolloutLog, RolloutLogLimits, selection_of, tokenizer_of
from runtime.gateway.steps.selection import Selection, select
from runtime.shared.schema import Group, Member, ScoredRollout, Validation
from tests.runtime.conftest import TINY_MODEL
from tests.runtime.recorded import answer, asked, choice, record, sampled
from tests.runtime.steps_run import SOON_SECONDS, Run, Running, drive

KEY = "sk-proj-0123456789abcdefghijABCDEFGHIJ"


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    return SampleStore(tmp_path / "samples")


def said(folder: Path, **bounds: Any) -> RolloutLog:
    return RolloutLog(folder, lambda: lambda ids: " ".join(map(str, ids)), RolloutLogLimits(**bounds))


def chosen(store: SampleStore, *groups: Group) -> Selection:
    return select(
        groups, store, taken=lambda sample: False, staleness_of=lambda version: 3 - version, max_staleness=2
    )


def group(name: str, rewards: dict[str, float | None], predictor: str | None = None) -> Group:
    members = [
        Member(rollout=rollout, reward=reward, failure=None if reward is not None else "the judge was away")
        for rollout, reward in rewards.items()
    ]
    return Group(id=name, predictor=predictor, members=members)


def lines(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    text = (folder / "logs" / "rollouts" / f"step-{step:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_g22_every_completion_of_a_step_is_written_with_its_reward_or_why_it_has_none(
    store: SampleStore, tmp_path: Path
) -> None:
    for rollout, version in (("good", 2), ("bad", 3), ("old", 0), ("unjudged", 3)):
        sampled(store, rollout, version)
    rewards = {"good": 1.0, "bad": 0.0, "old": 1.0, "unjudged": None, "silent": 0.5}
    said(tmp_path).write(1, chosen(store, group("g", rewards)), store, {})

    found = {line["rollout"]: line for line in lines(tmp_path)}
    assert {name: (line["reward"], line["dropped"]) for name, line in found.items()} == {
        "good": (1.0, None),
        "bad": (0.0, None),
        "old": (1.0, "stale"),
        "unjudged": (None, "the judge was away"),
        "silent": (0.5, "no sample"),
    }
    assert found["good"] | {"temperature": 1.0} == {
        "step": 1, "group": "g", "member": 0, "rollout": "good", "predictor": None, "call": None, "turn": 0,
        "continues": None, "reward": 1.0, "failure": None, "dropped": None, "version": 2,
        "temperature": 1.0, "finish_reason": "stop", "prompt_tokens": 2, "tokens": 3, "prompt": "1 2",
        "prompt_cut": False, "completion": "3 4 5", "completion_cut": False,
    }  # fmt: skip
    assert "completion" not in found["silent"]


def test_g22_the_text_is_that_of_the_ids_that_were_sampled(store: SampleStore, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    text = "bonjour le chat"
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    record(store, asked(rollout="r"), answer([ids[0]], choice(ids, [-0.5] * len(ids))), 3)
    selection = chosen(store, group("g", {"r": 1.0}))
    RolloutLog(tmp_path, lambda: tokenizer_of(str(TINY_MODEL))).write(1, selection, store, {})

    (line,) = lines(tmp_path)
    assert line["completion"] == tokenizer.decode(ids) and line["completion"].startswith(text)
    assert line["prompt"] == tokenizer.decode(ids[:1])
    assert tokenizer_of("nobody/nothing-of-that-name") is None


def test_g22_whole_groups_of_every_predictor_and_no_more_than_the_bounds(
    store: SampleStore, tmp_path: Path
) -> None:
    names = [f"r{number}" for number in range(12)]
    for name in names:
        record(store, asked(rollout=name), answer(list(range(50)), choice([7] * 40, [-0.5] * 40)), 3)
    parts = [dict.fromkeys(names[start : start + 3], 1.0) for start in (0, 3, 6, 9)]
    groups = [group(f"g{place}", part, "ab"[place // 2]) for place, part in enumerate(parts)]
    selection = chosen(store, *(one.model_copy(update={"predictor": None}) for one in groups))
    selection.groups = groups  # the samples are nobody's, the groups of two predictors

    said(tmp_path, rollouts=7).write(1, selection, store, {})
    assert [line["group"] for line in lines(tmp_path)] == ["g0"] * 3 + ["g2"] * 3 + ["g1"]

    said(tmp_path, prompt_characters=10, completion_characters=5).write(2, selection, store, {})
    first = lines(tmp_path, 2)[0]
    assert len(first["prompt"]) == 10 and first["prompt"].endswith("48 49")
    assert first["completion"] == "7 7 7" and first["prompt_cut"] and first["completion_cut"]

    said(tmp_path, step_bytes=2_000).write(3, selection, store, {})
    assert 0 < len(lines(tmp_path, 3)) < 12
    size = (tmp_path / "logs" / "rollouts" / "step-000001.jsonl").stat().st_size
    said(tmp_path, rollouts=7, total_bytes=2 * size + 10).write(4, selection, store, {})
    said(tmp_path, rollouts=7, total_bytes=2 * size + 10).write(5, selection, store, {})
    kept = sorted(path.name for path in (tmp_path / "logs" / "rollouts").iterdir())
    assert kept == ["step-000004.jsonl", "step-000005.jsonl"]

    said(tmp_path, rollouts=0).write(6, selection, store, {})
    assert not (tmp_path / "logs" / "rollouts" / "step-000006.jsonl").exists()


def test_g22_a_turn_has_what_came_after_the_turn_that_it_goes_on_from(
    store: SampleStore, tmp_path: Path
) -> None:
    """Of an agent's conversation each text is there once, and a second conversation beside it is whole."""
    for prompt, completion in (
        ([1, 2], [3]),
        ([8], [9]),
        ([1, 2, 3, 4, 5], [6]),
        ([1, 2, 3, 4, 5, 6, 7], [2]),
    ):
        record(store, asked(rollout="r"), answer(prompt, choice(completion, [-0.5] * len(completion))), 3)
    said(tmp_path).write(1, chosen(store, group("g", {"r": 1.0})), store, {})
    found = [(it["turn"], it["continues"], it["prompt"], it["completion"]) for it in lines(tmp_path)]
    assert found == [
        (0, None, "1 2", "3"), (1, None, "8", "9"), (2, 0, "4 5", "6"), (3, 2, "7", "2")
    ]  # fmt: skip
    assert [it["prompt_tokens"] for it in lines(tmp_path)] == [2, 1, 5, 7]


def test_g22_rollouts_are_whole_and_what_the_trainer_leaves_out_has_its_reason(
    store: SampleStore, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        for _ in range(3):
            sampled(store, name, 3)
    selection = chosen(store, group("g", dict.fromkeys("abc", 1.0)))
    why = dict.fromkeys(selection.ids[3:6], "no variance in its group")
    said(tmp_path, rollouts=2).write(1, selection, store, why)
    found = [(it["rollout"], it["turn"], it["dropped"]) for it in lines(tmp_path)]
    assert found == [
        *(("a", turn, None) for turn in range(3)),
        *(("b", turn, "no variance in its group") for turn in range(3)),
    ]
    size = (tmp_path / "logs" / "rollouts" / "step-000001.jsonl").stat().st_size
    said(tmp_path, step_bytes=size - 1).write(2, selection, store, why)
    assert [it["rollout"] for it in lines(tmp_path, 2)] == ["a"] * 3


def test_g22_an_empty_step_that_is_sent_again_has_its_texts_once(tmp_path: Path) -> None:
    """Beside a file whose name is odd, which nobody else's may be stopped by."""
    folder = tmp_path / "logs" / "rollouts"
    folder.mkdir(parents=True)
    (folder / "empty-000000-odd.jsonl").write_text("{}")

    async def work(run: Run) -> None:
        async with Running(run.queue(rollout_log=said(tmp_path))) as queue:
            request = run.request("k", "a", "b")
            flat = [one.model_copy(update={"reward": 1.0}) for one in request.groups[0].members]
            groups = [request.groups[0].model_copy(update={"members": flat})]
            empty = request.model_copy(update={"groups": groups})
            first = await queue.submit(empty)
            assert (first.state, first) == ("empty", await queue.submit(empty))

    drive(work, tmp_path)
    assert sorted(it.name for it in folder.iterdir()) == ["empty-000000-01.jsonl", "empty-000000-odd.jsonl"]


def test_g22_a_step_of_which_nothing_is_trained_has_its_texts_too(store: SampleStore, tmp_path: Path) -> None:
    sampled(store, "r", 3)
    selection = chosen(store, group("g", {"r": None}))
    for _ in range(6):
        said(tmp_path).write_empty(7, selection, store)
    said(tmp_path).write(8, selection, store, {})
    kept = sorted(path.name for path in (tmp_path / "logs" / "rollouts").iterdir())
    assert kept == [*(f"empty-000007-0{number}.jsonl" for number in (3, 4, 5, 6)), "step-000008.jsonl"]
    size = max(path.stat().st_size for path in (tmp_path / "logs" / "rollouts").iterdir())
    said(tmp_path, total_bytes=2 * size + 10).write(9, selection, store, {})
    kept = sorted(path.name for path in (tmp_path / "logs" / "rollouts").iterdir())
    assert kept == ["step-000008.jsonl", "step-000009.jsonl"]


def test_what_a_killed_process_left_half_written_goes(store: SampleStore, tmp_path: Path) -> None:
    sampled(store, "r", 3)
    left = tmp_path / "logs" / "rollouts" / ".step-000001.jsonl.77"
    left.parent.mkdir(parents=True)
    left.write_text("{")
    said(tmp_path).write(1, chosen(store, group("g", {"r": 1.0})), store, {})
    assert [path.name for path in left.parent.iterdir()] == ["step-000001.jsonl"]


def test_g14_what_looks_like_a_secret_is_hidden(store: SampleStore, tmp_path: Path) -> None:
    sampled(store, "r", 3)
    spoken = RolloutLog(tmp_path, lambda: lambda ids: f"the key is {KEY}, and 3 * 4 = 12")
    spoken.write(1, chosen(store, group("g", {"r": 1.0})), store, {})
    (line,) = lines(tmp_path)
    assert line["completion"] == line["prompt"] == "the key is ***, and 3 * 4 = 12"


def test_g14_what_a_program_says_of_a_failure_is_hidden_and_bounded(
    store: SampleStore, tmp_path: Path
) -> None:
    words = f"AuthenticationError: https://judge.example refused the key: {KEY} {'x' * 9_000}"
    members = [Member(rollout="r", failure=words), Member(rollout="s", predictor=KEY, reward=1.0)]
    selection = chosen(store, Group(id="g", members=members))
    said(tmp_path, step_bytes=3_000).write(1, selection, store, {})
    assert KEY[:12] not in json.dumps(lines(tmp_path)) + selection.counts.model_dump_json()
    first, second = lines(tmp_path)
    assert first["failure"].startswith("AuthenticationError: https://judge.example refused the key: *** x")
    assert len(first["failure"]) == 400 and len(first["dropped"]) == 80
    assert second["predictor"] == "***"


@pytest.mark.parametrize(
    ("letters", "prompt", "completion"),
    [
        (f"{KEY}, and then we went on to {KEY}", "and then we went on to ***", "and then we went on to"),
        (f"{'M' * 24}\nVm9=\n-----END RSA PRIVATE KEY-----\nAnd on.{' x' * 20}", "And on. x", None),
        (f"{'x ' * 20}and the key is {KEY}", None, "and the key is"),
    ],
)
def test_g14_of_a_secret_that_the_cut_goes_through_nothing_is_left(
    store: SampleStore, tmp_path: Path, letters: str, prompt: str | None, completion: str | None
) -> None:
    """An id is a letter here, and what is read is kept: the cut goes through the first key, or the last."""
    ids = [ord(letter) for letter in letters]
    cut = len(ids) - 20
    record(store, asked(rollout="r"), answer(ids, choice(ids, [-0.5] * len(ids))), 3)
    bounds = RolloutLogLimits(prompt_characters=cut, completion_characters=cut)
    spoken = RolloutLog(tmp_path, lambda: lambda ids: "".join(map(chr, ids)), bounds)
    spoken.write(1, chosen(store, group("g", {"r": 1.0})), store, {})
    (line,) = lines(tmp_path)
    assert KEY[24:30] not in line["prompt"] and "Vm9" not in line["prompt"]
    assert KEY[:12] not in line["completion"]
    assert prompt is None or line["prompt"].startswith(prompt)
    assert completion is None or line["completion"].endswith(completion)


def test_g22_a_step_is_handed_over_whatever_becomes_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")

    async def work(run: Run) -> None:
        queue = run.queue()
        queue._handover._rollout_log = said(tmp_path)
        async with Running(queue):
            await queue.submit(run.request("k", "a", "b"))
            await run.commit(1)
            assert (await queue.wait(1, SOON_SECONDS)).state == "published"

    drive(work, tmp_path)


def test_g22_a_steps_text_is_there_before_its_batch(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        queue._handover._rollout_log = said(tmp_path)
        async with Running(queue):
            await queue.submit(run.request("k", "a", "b"))
            await run.commit(1)
            await queue.wait(1, SOON_SECONDS)
        assert [line["reward"] for line in lines(tmp_path)] == [0.0, 1.0]

    drive(work, tmp_path)


def test_g22_a_validations_rollouts_have_their_texts_and_scores(store: SampleStore, tmp_path: Path) -> None:
    sampled(store, "v1", 3)
    rollouts = [
        ScoredRollout(rollout="v1", group="held out 0", reward=1.0),
        ScoredRollout(rollout="v2", group="held out 1", failure="the program crashed"),
    ]
    validation = Validation(compile="c", step=3, score=1.0, rollouts=rollouts)
    said(tmp_path).write_validation(validation, 3, selection_of(validation, store), store)
    path = tmp_path / "logs" / "rollouts" / "validation-000003-score-c.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(it["group"], it["rollout"], it["reward"], it.get("completion")) for it in found] == [
        ("held out 0", "v1", 1.0, "3 4 5"), ("held out 1", "v2", None, None)
    ]  # fmt: skip
    assert found[1]["failure"] == "the program crashed"


def test_g22_a_rollouts_own_figures_are_beside_its_reward(store: SampleStore, tmp_path: Path) -> None:
    sampled(store, "r", 3)
    member = Member(rollout="r", reward=1.0, metrics={"moves": 12.0, KEY: 1.0})
    said(tmp_path).write(1, chosen(store, Group(id="g", members=[member])), store, {})
    assert lines(tmp_path)[0]["metrics"] == {"moves": 12.0, "***": 1.0}
