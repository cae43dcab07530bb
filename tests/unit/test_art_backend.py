"""ART's backend by its methods, on a run that is played: what it sends and says, and that it ends nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.client.art import LocalBackend, SkyPilotBackend, SlipwayBackend, stderr_log
from launcher.client.failures import NotConnected, TrainingFailed
from launcher.client.no_progress import MAX_EMPTY_STEPS
from tests.support.small_run import SmallRun

MODEL = SimpleNamespace(
    name="agent", project="tests", trainable=True, base_model="tiny", _internal_config=None,
    inference_model_name=None,
)  # fmt: skip
PROMPTED = SimpleNamespace(name="gpt-4.1", project="tests", trainable=False, inference_model_name=None)


@dataclass
class Trajectory:
    """The fields that ART's has."""

    messages_and_choices: list[Any]
    reward: float = 0.0
    tools: Any = None
    additional_histories: list[Any] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        return [one if "role" in one else one["message"] for one in self.messages_and_choices]


@dataclass
class Group:
    trajectories: list[Trajectory]
    exceptions: list[Any] = field(default_factory=list)


@pytest.fixture
def backend(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> SlipwayBackend:
    monkeypatch.setattr(stderr_log, "_logged", set())
    run.refuse_empty = False  # it knows no samples by their ids
    return SlipwayBackend()


def choice(sample: str | None) -> dict[str, Any]:
    named = {} if sample is None else {"slipway": {"sample": sample, "version": 0}}
    return {"message": {"role": "assistant", "content": "words"}, "finish_reason": "stop", **named}


def pair(*samples: str | None) -> Group:
    user = {"role": "user", "content": "a question"}
    return Group([Trajectory([user, choice(it)], reward=float(n)) for n, it in enumerate(samples)])


def train(backend: SlipwayBackend, *groups: Group, **keywords: Any) -> Any:
    return asyncio.run(backend.train(MODEL, groups, **keywords))


def test_b07_outside_a_run_it_says_how_to_begin_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCH_BASE_URL", raising=False)
    with pytest.raises(NotConnected, match="launch -- python"):
        SlipwayBackend()
    assert LocalBackend is SkyPilotBackend is SlipwayBackend


def test_b07_each_trajectory_is_a_member_by_the_samples_of_its_choices(
    run: SmallRun, backend: SlipwayBackend
) -> None:
    group = pair("a/0", "b/0")
    group.trajectories[1].additional_histories = [SimpleNamespace(messages_and_choices=[choice("c/0")])]
    result = train(backend, group, Group([], [SimpleNamespace(type="<class 'ValueError'>")]))
    (sent,) = run.requests[1].groups
    assert [(it.samples, it.reward) for it in sent.members] == [(["a/0"], 0.0), (["b/0", "c/0"], 1.0)]
    assert (result.step, result.trained, result.metrics["samples_left_out"]) == (1, True, 1.0)
    assert asyncio.run(backend._get_step(MODEL)) == 1


def test_b07_what_cannot_be_trained_is_no_step_and_said_and_not_for_ever(
    run: SmallRun, backend: SlipwayBackend, capfd: pytest.CaptureFixture[str]
) -> None:
    silent = Group([Trajectory([{"role": "user", "content": "a question"}]) for _ in range(2)])
    for _ in range(MAX_EMPTY_STEPS - 1):
        result = train(backend, silent)
        assert (result.trained, result.step) == (False, 0)
    assert capfd.readouterr().err.count("2 × no answer in its trajectory") == 1
    with pytest.raises(TrainingFailed, match="2 × no answer in its trajectory"):
        train(backend, silent)
    assert not run.requests
    assert train(backend, pair("a/0", "b/0")).trained, "a step that trains begins the count anew"


def test_b09_keywords_are_settings_of_that_step_notes_and_refusals(
    run: SmallRun, backend: SlipwayBackend, capfd: pytest.CaptureFixture[str]
) -> None:
    train(backend, pair("a/0", "b/0"), learning_rate=1e-4, loss_fn="cispo", plot_tensors=True)
    train(backend, pair("c/0", "d/0"))
    settings = [it.settings and it.settings.model_dump(exclude_none=True) for it in run.requests.values()]
    assert settings == [{"learning_rate": 1e-4, "loss": "cispo"}, None]
    assert "art: train(): plot_tensors=True" in capfd.readouterr().err
    with pytest.raises(TrainingFailed, match="change kimi_k2_tau, lerning_rate in train\\(\\)"):
        train(backend, pair("e/0", "f/0"), kimi_k2_tau=0.1, lerning_rate=1e-4)
    with pytest.raises(TrainingFailed, match=r"launch --set train\.mismatch_cap=5\.0"):
        train(backend, pair("e/0", "f/0"), truncated_importance_sampling=5.0)
    assert len(run.requests) == 2


@pytest.mark.parametrize(
    ("size", "rate", "batches", "rates"),
    [
        (2, 1e-4, [2, 2, 1], [1e-4] * 3),
        ("auto", 5e-5, [5], [5e-5]),
        (3, [1e-4, 2e-4], [3, 2], [1e-4, 2e-4]),
    ],
)
def test_b07_train_sft_is_a_step_for_each_batch_with_its_rate(
    run: SmallRun, backend: SlipwayBackend, size: Any, rate: Any, batches: list[int], rates: list[float]
) -> None:
    async def learned() -> list[dict[str, float]]:
        lines = [Trajectory([{"role": "user", "content": "q"}, choice(None)]) for _ in range(5)]
        config = SimpleNamespace(batch_size=size, learning_rate=rate)
        return [line async for line in backend._train_sft(MODEL, iter(lines), config, {})]

    measured = asyncio.run(learned())
    assert [len(it.examples) for it in run.requests.values()] == batches
    assert [it.settings and it.settings.learning_rate for it in run.requests.values()] == rates
    assert run.requests[1].examples[0].messages[-1] == {"role": "assistant", "content": "words"}
    assert {line["data/step_num_gradient_steps"] for line in measured} == {float(len(batches))}


def test_b07_fewer_rates_than_batches_are_an_error_before_any_step(
    run: SmallRun, backend: SlipwayBackend
) -> None:
    async def learned() -> None:
        config = SimpleNamespace(batch_size=1, learning_rate=[1e-4])
        lines = [Trajectory([{"role": "user", "content": "q"}, choice(None)]) for _ in range(2)]
        async for _ in backend._train_sft(MODEL, lines, config):
            pass

    with pytest.raises(ValueError, match="1 values, and there are 2 batches"):
        asyncio.run(learned())
    assert not run.requests


def test_b07_delete_checkpoints_pins_the_best_and_deletes_nothing(
    run: SmallRun, backend: SlipwayBackend, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        train(backend, pair(f"a{number}/0", f"b{number}/0"))
    asyncio.run(backend._delete_checkpoint_files(MODEL, [3, 1, 0]))
    assert run.named == ["step-000001"]
    run.prunes = True
    asyncio.run(backend._delete_checkpoint_files(MODEL, [3, 2]))
    assert "step 2 is the best, and no longer kept" in capfd.readouterr().err


def test_b07_a_model_is_asked_by_its_own_name_and_another_by_its_own(backend: SlipwayBackend) -> None:
    assert backend._model_inference_name(MODEL) == "agent"
    assert backend._model_inference_name(MODEL, 7) == "agent@7"
    assert backend._model_inference_name(PROMPTED) == "gpt-4.1"
    asyncio.run(backend.register(PROMPTED))  # the run is not asked, and does not know the route


@pytest.mark.parametrize("end", ["close", "down"])
def test_b07_closing_it_ends_nothing_and_says_what_does(
    run: SmallRun, backend: SlipwayBackend, end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(getattr(backend, end)())
    with backend:
        pass
    assert capfd.readouterr().err.count("launch down") == 1
    assert train(backend, pair("a/0", "b/0")).trained


def test_b07_a_clusters_names_begin_none(run: SmallRun, capfd: pytest.CaptureFixture[str]) -> None:
    begun = SkyPilotBackend.initialize_cluster(cluster_name="art", gpu="H100-SXM", env_path=".env")
    assert isinstance(asyncio.run(begun), SlipwayBackend)
    assert "the run is launch's, and so is its cluster" in capfd.readouterr().err


@pytest.mark.process
def test_b07_it_imports_neither_art_nor_what_only_we_have() -> None:
    code = (
        "import sys, launcher.client.art\n"
        "print(sorted({'art', 'torch', 'dspy', 'openai', 'typer', 'aiohttp', 'psutil'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
