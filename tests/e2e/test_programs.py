"""Programs as users write them, on a real engine and trainer: what is trained is what was sampled.

Four that go wrong silently elsewhere, one step each on one run. What the optimizer sent, what the gateway had
recorded and what the trainer was given are three records; each is read by itself and they must agree.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM, Session, connect
from runtime.shared.batch import Batch, read_batch
from runtime.shared.schema import Group
from runtime.tiny.grammar import training_phrases
from tests.support.launched import Launched

pytestmark = pytest.mark.slow

ROLLOUTS = 8
FORMAT_FAILURE = -1.0


def odd(text: str) -> bool:
    """As good as a coin, and the same for the same text."""
    return zlib.crc32(text.encode()) % 2 == 1


def value(text: str) -> float:
    """A reward that tells most answers apart."""
    return zlib.crc32(text.encode()) % 97 / 97


class Picky(dspy.ChatAdapter):
    """Refuses about half of the answers, whatever they say, as a parse() that raises a ValueError does."""

    def refuses(self, completion: str) -> bool:
        return odd(completion)

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        if self.refuses(completion):
            raise ValueError("not in the mood")
        return {"french": completion}


class Pickier(Picky):
    """Refuses one answer more, wherever it comes: so some are, however all of the coins fall."""

    def __init__(self) -> None:
        super().__init__()
        self._disliked: dict[str, str] = {}

    def refuses(self, completion: str) -> bool:
        return super().refuses(completion) or completion == self._disliked.setdefault("it", completion)


class Anything(dspy.ChatAdapter):
    """Takes every answer as it is."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return {"french": completion}


class Partial(dspy.ChatAdapter):
    """Finds only one of two fields in about half of the answers."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        found = completion if odd(completion) else f"{completion}\n\n[[ ## note ## ]]\nfine"
        return super().parse(signature, f"[[ ## french ## ]]\n{found}")


class Retrying(dspy.Module):
    """Swallows what does not parse and asks again."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = dspy.Predict("english -> french")

    def forward(self, english: str) -> dspy.Prediction:
        for _ in range(3):
            try:
                return self.ask(english=english)
            except Exception:  # noqa: BLE001 - programs are written so
                continue
        return dspy.Prediction(french="")


class Restless(dspy.Module):
    """Asks `first` once to four times, and `second` in every other run only."""

    runs = itertools.count()  # of the class: a program is copied

    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("english -> french")
        self.second = dspy.Predict("english -> french")

    def forward(self, english: str) -> dspy.Prediction:
        answer, run = self.first(english=english), next(self.runs)
        for _ in range(run % 4):
            self.first(english=english)
        return self.second(english=english) if run % 2 else answer


def with_demos() -> dspy.Module:
    program = dspy.Predict("english -> french")
    program.demos = [dspy.Example(english=it.english, french=it.french) for it in training_phrases(2, seed=9)]
    return program


@dataclass
class Trained:
    """One optimizer's step, in the three records of it."""

    optimizer: GRPO
    sent: list[Group]
    batch: Batch
    # Every sample of a rollout of this step, by (rollout, predictor, call).
    recorded: dict[tuple[str, str, int], dict[str, Any]]

    def reward_of(self, rollout: str, predictor: str, call: int) -> float | None:
        """What the optimizer sent for one call."""
        (member,) = [
            it
            for group in self.sent
            for it in group.members
            if (it.rollout, it.predictor) == (rollout, predictor) and it.call in (None, call)
        ]
        return member.reward


@dataclass
class Trainer:
    """Runs optimizers on the shared run and reads what it left on disk."""

    endpoint: Launched
    session: Session
    sent: list[Group] = field(default_factory=list)

    def train(self, program: dspy.Module, adapter: dspy.Adapter | None = None) -> Trained:
        program.set_lm(PolicyLM(self.session, max_tokens=64))
        data = [
            dspy.Example(english=it.english, french=it.french).with_inputs("english")
            for it in training_phrases(2, seed=5)
        ]
        optimizer = GRPO(
            lambda example, prediction, trace=None: value(prediction.french),
            num_train_steps=1,
            num_dspy_examples_per_grpo_step=2,
            num_rollouts_per_grpo_step=ROLLOUTS,
            format_failure_score=FORMAT_FAILURE,
            adapter=adapter,
            checkpoint="none",
            session=self.session,
        )
        self.sent.clear()
        optimizer.compile(program, trainset=data)
        step = max((self.endpoint.run_dir / "machine" / "steps").glob("0*"))
        rollouts = {member.rollout for group in self.sent for member in group.members}
        return Trained(optimizer, list(self.sent), read_batch(step), self._recorded(rollouts))

    def _recorded(self, rollouts: set[str]) -> dict[tuple[str, str, int], dict[str, Any]]:
        found: dict[tuple[str, str, int], dict[str, Any]] = {}
        for path in sorted((self.endpoint.run_dir / "machine" / "samples").glob("*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                tags = line.get("tags") or {}
                if tags.get("rollout") in rollouts:
                    key = (tags["rollout"], tags["predictor"], tags["call"])
                    assert key not in found
                    found[key] = line
        return found


def session_of(endpoint: Launched) -> Session:
    done = subprocess.run(
        [*endpoint.executable, "env", "shared"],
        env={**os.environ, "LAUNCH_HOME": str(endpoint.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = (line.removeprefix("export ").partition("=") for line in done.stdout.splitlines())
    variables = {name: value.strip("'\"") for name, _, value in pairs}
    return connect(variables["LAUNCH_BASE_URL"], variables["LAUNCH_API_KEY"])


@pytest.fixture(scope="module")
def trainer(endpoint: Launched) -> Trainer:
    session = session_of(endpoint)
    trainer = Trainer(endpoint, session)
    original = session.step

    def step(groups: Any, *words: Any, **named: Any) -> Any:
        trainer.sent += list(groups)
        return original(trainer.sent, *words, **named)

    session.step = step  # type: ignore[method-assign]
    return trainer


def check_exact(trained: Trained) -> None:
    """Every answered call is in the batch once, with the ids, logprobs and reward that belong to it."""
    batch = trained.batch
    in_batch: Counter[tuple[str, str, int]] = Counter()
    for place, listed in enumerate(batch.meta["samples"]):
        span = batch.span(place)
        tokens, logprobs, sampled = batch.tokens[span], batch.logprobs[span], batch.sampled[span]
        for turn in listed["turns"]:
            key = (listed["rollout"], listed["predictor"], turn["call"])
            in_batch[key] += 1
            exchange = trained.recorded[key]
            (sample,) = exchange["samples"]
            prompt = exchange["prompts"][sample["prompt"]]
            assert tokens[: turn["start"]].tolist() == prompt
            assert tokens[turn["start"] : turn["end"]].tolist() == sample["completion_ids"]
            assert logprobs[turn["start"] : turn["end"]] == pytest.approx(sample["logprobs"], abs=1e-6)
            assert sampled[turn["start"] : turn["end"]].all()
            reward = batch.reward[batch.member[place]]
            assert float(reward) == pytest.approx(trained.reward_of(*key))
    assert set(in_batch) == set(trained.recorded)
    assert set(in_batch.values()) == {1}
    report = trained.optimizer.report
    assert report.samples == len(trained.recorded)
    assert report.trained + report.dropped.total() == report.samples
    assert (report.retokenised, report.rollouts) == (0, 2 * ROLLOUTS)
    assert report.trained > 0


@dataclass(frozen=True)
class Answer:
    """What a call was answered, out of the gateway's record; `failed`: it deserves the format failure."""

    text: str
    failed: bool


def answers(trained: Trained, refuses: Callable[[str], bool] = odd) -> dict[tuple[str, str, int], Answer]:
    found = {}
    for key, line in trained.recorded.items():
        (choice,) = line["answer"]["choices"]
        text = choice["message"]["content"]
        found[key] = Answer(text, refuses(text) or choice["finish_reason"] == "length")
    return found


def test_swallowed_parse_errors_are_trained_as_format_failures(trainer: Trainer) -> None:
    pickier = Pickier()
    trained = trainer.train(Retrying(), pickier)
    check_exact(trained)
    answered = answers(trained, pickier.refuses)
    for key, answer in answered.items():
        expected = FORMAT_FAILURE if answer.failed else value(answer.text)
        assert trained.reward_of(*key) == pytest.approx(expected)
    assert any(call for _, _, call in answered)  # some were asked again
    assert trained.optimizer.report.outcomes == {"scored": 2 * ROLLOUTS}


def test_partial_parses_are_trained_as_sampled_not_dropped_and_not_padded(trainer: Trainer) -> None:
    trained = trainer.train(dspy.Predict("english -> french, note"), Partial())
    check_exact(trained)
    answered = answers(trained)
    failed = {key for key, answer in answered.items() if answer.failed}
    assert len(answered) == 2 * ROLLOUTS and 0 < len(failed) < len(answered)
    assert {key for key in answered if trained.reward_of(*key) == FORMAT_FAILURE} == failed
    unparsed = sum(odd(answer.text) for answer in answered.values())
    outcomes = {"unparsed": unparsed, "scored": len(answered) - unparsed}
    assert trained.optimizer.report.outcomes == outcomes


def test_predictors_called_a_varying_number_of_times_are_trained_on_all_their_calls(
    trainer: Trainer,
) -> None:
    trained = trainer.train(Restless(), Anything())
    check_exact(trained)
    calls = Counter((rollout, predictor) for rollout, predictor, _ in trained.recorded)
    first = [count for (_, predictor), count in calls.items() if predictor == "first"]
    second = [count for (_, predictor), count in calls.items() if predictor == "second"]
    assert len(first) == 2 * ROLLOUTS and set(first) == {1, 2, 3, 4}
    assert len(second) == ROLLOUTS
    rewards: dict[str, set[float | None]] = defaultdict(set)
    for rollout, predictor, call in trained.recorded:
        rewards[rollout].add(trained.reward_of(rollout, predictor, call))
    assert all(len(found - {FORMAT_FAILURE}) <= 1 for found in rewards.values())  # one score for all of a run


def test_demos_and_a_custom_adapter_are_in_the_prompt_that_is_trained(trainer: Trainer) -> None:
    plain = trainer.train(dspy.Predict("english -> french"), Picky())
    trained = trainer.train(with_demos(), Picky())
    check_exact(trained)
    longest = max(len(line["prompts"][0]) for line in plain.recorded.values())
    assert min(len(line["prompts"][0]) for line in trained.recorded.values()) > longest
    for key, answer in answers(trained).items():
        assert (trained.reward_of(*key) == FORMAT_FAILURE) == answer.failed


def test_a05_a_rate_and_a_loss_said_in_python_are_those_of_each_step_and_of_no_other_compile(
    endpoint: Launched,
) -> None:
    session = session_of(endpoint)
    before = session.status().step
    said = {
        "learning_rate": 1e-4, "lr_scheduler_type": "linear", "warmup_steps": 1, "loss_type": "dapo",
        "weight_decay": 0.01, "max_grad_norm": 0.5, "beta": 0.01, "scale_rewards": False,
    }  # fmt: skip
    rewards = (
        itertools.count()
    )  # a reward of the text may be that of a whole group, which trains nothing then
    for train_kwargs, steps, seed in ((said, 3, 0), (None, 1, 1)):
        program = dspy.Predict("english -> french")
        program.set_lm(PolicyLM(session, max_tokens=32))
        optimizer = GRPO(
            lambda example, prediction, trace=None: float(next(rewards)),
            train_kwargs=train_kwargs,
            num_train_steps=steps,
            num_dspy_examples_per_grpo_step=1,
            num_rollouts_per_grpo_step=4,
            seed=seed,
            adapter=Anything(),
            checkpoint="none",
            session=session,
        )
        data = [dspy.Example(english=it.english).with_inputs("english") for it in training_phrases(3, seed=7)]
        optimizer.compile(program, trainset=data)
    lines = session.metrics(after=before)
    rates = [line["metrics"]["learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-4, 1e-4, 0.5e-4, lines[3]["settings"]["learning_rate"]])
    settings = {
        "loss": "dapo",
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "kl_beta": 0.01,
        "scale_rewards": False,
    }
    for line in lines[:3]:
        assert {name: line["settings"][name] for name in settings} == settings
    assert (lines[3]["settings"]["loss"], lines[3]["settings"]["schedule"]) == ("grpo", "constant")
    assert lines[3]["settings"]["learning_rate"] == 2e-3  # the tiny model's own
