"""ART's backend on a run whose gateway and relay are real: what it trains and what it counts (B7, B12)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from launcher.client.art import SlipwayBackend
from launcher.client.art.art_training import TrainResult
from launcher.client.failures import Refused, TrainingFailed
from launcher.proxy.relay import Relay
from tests.runtime.gateway_process import TOKEN
from tests.runtime.gateway_run import GatewayRun, gateway_runs

pytestmark = pytest.mark.process

JUDGE = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "another's words"}}


class Program:
    """A program for ART: its backend, its model, and what it keeps of what it was answered."""

    def __init__(self, run: GatewayRun, url: str, name: str = "agent-001") -> None:
        self.run = run
        self._url = url
        self.backend = SlipwayBackend()
        self.model = SimpleNamespace(
            name=name, project="tests", trainable=True, base_model=run.folder.name, _internal_config=None
        )

    def register(self, **changes: Any) -> None:
        asyncio.run(self.backend.register(SimpleNamespace(**{**vars(self.model), **changes})))

    def chat(self, model: str, messages: list[Any] | None = None) -> httpx.Response:
        body = {"model": model, "messages": messages or [{"role": "user", "content": "?"}], "max_tokens": 8}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.post(
            f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
        )

    def trajectory(self, reward: float, turns: int = 1, model: str | None = None) -> SimpleNamespace:
        """What was just sampled."""
        history: list[dict[str, Any]] = []
        for turn in range(turns):
            history.append({"role": "user", "content": f"question {turn}"})
            answer = self.chat(model or self.model.name, [one.get("message", one) for one in history])
            assert answer.status_code == 200, answer.text
            history.append(answer.json()["choices"][0])
        return SimpleNamespace(messages_and_choices=history, additional_histories=[], reward=reward)

    def train(self, *groups: Any, **keywords: Any) -> TrainResult:
        listed = [
            one if isinstance(one, SimpleNamespace) else SimpleNamespace(trajectories=one, exceptions=[])
            for one in groups
        ]
        return asyncio.run(self.backend.train(self.model, listed, **keywords))

    @property
    def newest_batch(self) -> dict[str, Any]:
        return json.loads(max((self.run.folder / "steps").glob("[0-9]*/batch.json")).read_text())

    @property
    def newest_step(self) -> list[str]:
        """The samples that were trained in it."""
        trained = self.run.trainer.trained
        return sorted(trained[max(trained)])


@contextmanager
def program_of(run: GatewayRun) -> Iterator[Program]:
    relay = Relay(run.gateway.socket, 0, token=TOKEN)
    url = f"http://127.0.0.1:{relay.start()}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LAUNCH_BASE_URL", f"{url}/v1")
            patch.setenv("LAUNCH_API_KEY", TOKEN)
            yield Program(run, url)
    finally:
        relay.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """One for what breaks nothing."""
    with gateway_runs(tmp_path_factory.mktemp("shared")) as make, program_of(make()) as program:
        program.register()
        yield program


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., GatewayRun]]:
    """Runs that a test may break."""
    with gateway_runs(tmp_path) as make:
        yield make


def nameless(trajectory: SimpleNamespace) -> SimpleNamespace:
    """As a library rebuilds its choices: their words, and nothing beside them."""
    kept = {"finish_reason", "index", "message"}
    history = [
        {name: value for name, value in one.items() if name in kept} if "message" in one else one
        for one in trajectory.messages_and_choices
    ]
    return SimpleNamespace(**{**vars(trajectory), "messages_and_choices": history})


def names(*trajectories: SimpleNamespace) -> list[str]:
    return sorted(
        one["slipway"]["sample"]
        for trajectory in trajectories
        for one in trajectory.messages_and_choices
        if "slipway" in one
    )


def figures(result: TrainResult) -> tuple[float, float]:
    return result.metrics["samples_trained"], result.metrics["samples_left_out"]


def test_b07_a_model_asks_by_its_name_and_trains_exactly_what_it_sampled(shared: Program) -> None:
    before = asyncio.run(shared.backend._get_step(shared.model))
    pair = [shared.trajectory(0.0, turns=2), shared.trajectory(1.0, turns=2)]
    side = shared.trajectory(0.0)
    pair[1].additional_histories = [SimpleNamespace(messages_and_choices=side.messages_and_choices)]
    result = shared.train(pair, learning_rate=1e-4, kl_penalty_coef=0.0)
    assert (result.step, result.metrics["loss/train"], figures(result)) == (before + 1, 0.5, (5.0, 0.0))
    assert shared.newest_step == names(*pair, side)
    settings = shared.newest_batch["settings"]
    assert settings["learning_rate"] == 1e-4 and settings["kl_beta"] == 0.0
    assert shared.chat("agent-001").json()["model"] == f"policy@v{before + 1}"
    assert shared.chat(f"agent-001@{before}").json()["model"] == f"policy@v{before}"
    assert shared.chat("agent-002").status_code == 404


def test_b12_what_the_model_before_training_said_is_counted_and_never_trained(shared: Program) -> None:
    """Asked by its name it is a judge, or an opponent: its answer is no sample of the policy."""
    policy, judged = shared.trajectory(0.0), shared.trajectory(1.0)
    judged.messages_and_choices += shared.trajectory(1.0, model="base").messages_and_choices
    assert figures(shared.train([policy, judged])) == (2, 1)
    assert shared.newest_step == sorted([*names(policy), judged.messages_and_choices[1]["slipway"]["sample"]])


def test_b12_another_models_choice_in_a_history_is_counted_and_never_trained(shared: Program) -> None:
    pair = [shared.trajectory(0.0), shared.trajectory(1.0)]
    for one in pair:
        one.messages_and_choices.insert(0, JUDGE)
    pair[1].messages_and_choices.append(pair[1].messages_and_choices[-1])  # named twice
    only = SimpleNamespace(
        messages_and_choices=[pair[0].messages_and_choices[1], JUDGE], additional_histories=[], reward=0.5
    )
    raised = SimpleNamespace(trajectories=[], exceptions=[SimpleNamespace(type="<class 'ValueError'>")])
    assert figures(shared.train([*pair, only], raised)) == (2, 5)
    assert shared.newest_step == sorted({*names(*pair)})


def test_b08_a_choice_that_lost_its_name_is_found_by_what_was_said_and_no_other_is(shared: Program) -> None:
    pair = [shared.trajectory(float(number), turns=2) for number in range(4)]
    judged = nameless(pair[1])
    judged.messages_and_choices.append(JUDGE)
    sent = [nameless(pair[0]), judged, pair[2], nameless(pair[3])]
    assert figures(shared.train(sent)) == (8, 1)
    assert shared.newest_step == names(*pair)
    assert shared.newest_batch["counts"]["retokenised"] == 0
    assert not shared.train(sent).trained and not shared.train(pair).trained, "they were trained before"
    assert len(shared.run.trained) == len(set(shared.run.trained))


def test_b07_a_run_is_one_policy_with_one_name_and_one_base_model(
    own: Callable[..., GatewayRun], capfd: pytest.CaptureFixture[str]
) -> None:
    run = own()
    with program_of(run) as program:
        with pytest.raises(Refused, match=r"trains run, not Qwen/Qwen3-8B: launch --model Qwen/Qwen3-8B"):
            program.register(base_model="Qwen/Qwen3-8B")
        program.register()
        with pytest.raises(Refused) as other:
            program.register(name="agent-002")
        assert (other.value.status, other.value.code) == (409, "another_policy")
        for odd in ("a@1", "a/b", " a", "base"):
            with pytest.raises(Refused) as refused:
                Program(run, program._url, odd).register()
            assert refused.value.status in (400, 409)
        program.register(name="gpt-4.1", trainable=False)
        assert program.chat("gpt-4.1").status_code == 404, "what another model says is no policy's"
        run.gateway.kill()
        run.restart()
        assert program.chat("agent-001").status_code == 200, "the name is known after a restart"
        with pytest.raises(TrainingFailed, match=r"--set train\.lora\.rank=3"):
            program.register(_internal_config={"peft_args": {"r": 3}})
        program.register(_internal_config={"init_args": {"max_seq_length": 64}, "engine_args": {"x": 1}})
        assert "art: _internal_config: engine_args has no effect" in capfd.readouterr().err


def test_b07_a_name_that_an_older_runtime_has_kept_is_known(
    own: Callable[..., GatewayRun], tmp_path: Path
) -> None:
    """With what it wrote for the clients of wires that are retired, which nothing reads any more."""
    history = tmp_path / "run" / "art" / "history"
    history.mkdir(parents=True)
    (history / "3f2a9c11d0.jsonl").write_text('{"step": 1, "val/reward": 0.5}\n')
    (history.parent / "models.json").write_text('{"policy": "agent-001"}')
    rounds = tmp_path / "run" / "arbor" / "brave-otter-3f2a9c11" / "rounds"
    rounds.mkdir(parents=True)
    (rounds / "000001.jsonl").write_text('{"batch": 1, "digest": "d"}\n')
    (rounds.parent / "job.json").write_text('{"id": "grpo:policy:brave-otter-3f2a9c11:20261121"}')
    assert own().gateway.chat(model="agent-001").status_code == 200
