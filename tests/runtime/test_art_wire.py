"""The wire for ART's clients of 2025: what it trains and what it counts; what goes wrong is an error (B8)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from runtime.gateway.art import training
from runtime.gateway.art.training import MOST_UNTRAINED
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.step_errors import QueueFullError
from runtime.shared.schema import Group, Member, StepRequest
from runtime.shared.statuses import StepStatus
from tests.runtime.arbor_wire import Wire, wires

pytestmark = pytest.mark.process

DOOR = {"x-slipway-door": "127.0.0.1:7453"}
JUDGE = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "another's words"}}


class Client:
    """What openpipe-art 0.4.11 sends of a model."""

    def __init__(self, wire: Wire, name: str = "agent-001") -> None:
        self.wire = wire
        self.model: dict[str, Any] = {
            "name": name, "project": "tests", "config": None, "trainable": True, "inference_api_key": None,
            "inference_base_url": None, "inference_model_name": None, "base_model": wire.folder.name,
            "_internal_config": None,
        }  # fmt: skip

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.wire.gateway.http.post(path, json=self.model if body is None else body, **options)

    def ask(self, path: str, body: Any = None, **options: Any) -> Any:
        answer = self.post(path, body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.headers["content-type"] == "application/json" else answer.text

    def ask_get(self, path: str) -> Any:
        return self.wire.gateway.http.get(path).json()

    def trajectory(self, reward: float, model: str | None = None, turns: int = 1) -> dict[str, Any]:
        """What was just sampled, as ART keeps it."""
        history: list[dict[str, Any]] = []
        for turn in range(turns):
            history.append({"role": "user", "content": f"question {turn}"})
            asked = [one if "role" in one else one["message"] for one in history]
            answer = self.wire.gateway.chat(model=model or self.model["name"], messages=asked)
            assert answer.status_code == 200, answer.text
            history.append(answer.json()["choices"][0])
        return {
            "messages_and_choices": history, "tools": None, "additional_histories": [], "reward": reward,
            "metrics": {"length": turns}, "metadata": {}, "logs": [],
        }  # fmt: skip

    def body(self, groups: list[Any], config: Any = None, **dev: Any) -> dict[str, Any]:
        listed = [one if isinstance(one, dict) else {"trajectories": one, "exceptions": []} for one in groups]
        said = {"model": self.model, "trajectory_groups": listed, "verbose": False}
        return said | {"config": config or {"learning_rate": 1e-4, "beta": 0.0}, "dev_config": dev}

    def train(self, groups: list[Any], config: Any = None, **dev: Any) -> list[dict[str, Any]]:
        text = self.ask("/_train_model", self.body(groups, config, **dev))
        return [json.loads(line) for line in text.splitlines()]

    def refused(self, path: str, body: Any) -> tuple[int, str, str]:
        answer = self.post(path, body)
        error = answer.json()["error"]
        assert answer.headers["x-slipway-reason"].split() == error["message"][:400].split()
        return answer.status_code, error["code"], error["message"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One for what breaks nothing."""
    with wires(tmp_path_factory.mktemp("shared")) as make:
        client = Client(make())
        client.ask("/register")
        yield client


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., Wire]]:
    """Wires that a test may break."""
    with wires(tmp_path) as make:
        yield make


def without_names(trajectory: dict[str, Any]) -> dict[str, Any]:
    """As the client keeps it that streams in its gather: the words of a choice, and nothing beside them."""
    kept = {"finish_reason", "index", "logprobs", "message"}
    history = [
        {name: value for name, value in one.items() if name in kept} if "message" in one else one
        for one in trajectory["messages_and_choices"]
    ]
    return {**trajectory, "messages_and_choices": history}


def ids(trajectory: dict[str, Any]) -> list[str]:
    return [one["slipway"]["sample"] for one in trajectory["messages_and_choices"] if "slipway" in one]


def test_b08_a_model_asks_by_its_name_and_trains_exactly_what_it_sampled(shared: Client) -> None:
    asked = {"model": shared.model, "config": None}
    address = shared.ask("/_prepare_backend_for_training", asked, headers=DOOR)
    assert address == ["http://127.0.0.1:7453/v1", "not-needed"]
    before = shared.ask("/_get_step")
    pair = [shared.trajectory(0.0, turns=2), shared.trajectory(1.0, turns=2)]
    side = shared.trajectory(0.0)
    pair[1]["additional_histories"] = [{"messages_and_choices": side["messages_and_choices"], "tools": None}]
    (line,) = shared.train([pair])
    assert line["num_gradient_steps"] == 1 and line["samples_trained"] == 5 and line["loss"] == 0.5
    step = max(shared.wire.trainer.trained)
    sampled = [*ids(pair[0]), *ids(pair[1]), *ids(side)]
    assert sorted(shared.wire.trainer.trained[step]) == sorted(sampled)
    assert shared.ask("/_get_step") == before + 1
    settings = json.loads((shared.wire.folder / f"steps/{step:06d}/batch.json").read_text())["settings"]
    assert settings["learning_rate"] == 1e-4 and settings["kl_beta"] == 0.0
    newest = shared.wire.gateway.chat(model="agent-001").json()["model"]
    assert newest == f"policy@v{before + 1}"
    assert shared.wire.gateway.chat(model=f"agent-001@{before}").json()["model"] == f"policy@v{before}"
    assert shared.wire.gateway.chat(model="agent-002").status_code == 404


def test_b12_what_the_model_before_training_said_is_counted_and_never_trained(
    own: Callable[..., Wire],
) -> None:
    """Asked by its name it is a judge, or an opponent: its answer is no sample of the policy."""
    client = Client(own())
    client.ask("/register")
    policy, judged = client.trajectory(0.0), client.trajectory(1.0)
    judged["messages_and_choices"] += client.trajectory(1.0, model="base")["messages_and_choices"]
    (line,) = client.train([[policy, judged]])
    assert (line["samples_trained"], line["samples_left_out"]) == (2, 1)
    assert client.wire.trainer.trained[1] == [*ids(policy), ids(judged)[0]]


def test_b12_another_models_choice_in_a_history_is_counted_and_never_trained(shared: Client) -> None:
    pair = [shared.trajectory(0.0), shared.trajectory(1.0)]
    for one in pair:
        one["messages_and_choices"].insert(0, JUDGE)
    pair[1]["messages_and_choices"].append(pair[1]["messages_and_choices"][-1])  # named twice
    only = {**pair[0], "messages_and_choices": [pair[0]["messages_and_choices"][1], JUDGE]}
    raised = {
        "trajectories": [],
        "exceptions": [{"type": "<class 'ValueError'>", "message": "", "traceback": ""}],
    }
    (line,) = shared.train([[*pair, only], raised])
    assert (line["samples_trained"], line["samples_left_out"]) == (2, 5)
    step = max(shared.wire.trainer.trained)
    assert sorted(shared.wire.trainer.trained[step]) == sorted({*ids(pair[0]), *ids(pair[1])})
    left_out = '{"raised ValueError": 1, "answer of another model": 3, "named twice": 1}'
    log = (shared.wire.gateway.folder / "gateway.log").read_text()
    assert f"step {step}: left out before: {left_out}" in log


def test_b08_a_choice_that_lost_its_name_is_found_by_what_was_said_and_no_other_is(shared: Client) -> None:
    pair = [shared.trajectory(float(number), turns=2) for number in range(4)]
    judged = without_names(pair[1])
    judged["messages_and_choices"].append(JUDGE)
    (line,) = shared.train([[without_names(pair[0]), judged, pair[2], without_names(pair[3])]])
    assert (line["samples_trained"], line["samples_left_out"]) == (8, 1)
    step = max(shared.wire.trainer.trained)
    assert sorted(shared.wire.trainer.trained[step]) == sorted(one for it in pair for one in ids(it))
    batch = json.loads((shared.wire.folder / f"steps/{step:06d}/batch.json").read_text())
    assert batch["counts"]["retokenised"] == 0


def test_b08_one_request_asked_again_is_one_step_and_no_sample_is_trained_twice(shared: Client) -> None:
    pair = [shared.trajectory(0.0), shared.trajectory(1.0)]
    headers = {"x-slipway-request": "one-request"}
    answers = {shared.ask("/_train_model", shared.body([pair]), headers=headers) for _ in range(3)}
    assert len(answers) == 1 and json.loads(answers.pop())["samples_trained"] == 2
    assert shared.train([pair]) == [], "sent anew they were trained before"
    assert shared.train([[without_names(one) for one in pair]]) == []
    assert len(shared.wire.trained) == len(set(shared.wire.trained))


def test_b08_names_that_no_answer_has_are_refused(shared: Client) -> None:
    strange = [{**JUDGE, "slipway": {"sample": "s" * 300}}]
    many = [{**JUDGE, "slipway": {"sample": str(number)}} for number in range(5000)]
    for history in (strange, many):
        body = shared.body([[{"messages_and_choices": history, "reward": 1.0}]])
        answer = shared.post("/_train_model", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "trajectory_groups")


def test_b08_nothing_to_train_is_no_step_and_not_for_ever(own: Callable[..., Wire]) -> None:
    client = Client(own())
    client.ask("/register")
    nothing = {**client.trajectory(1.0), "messages_and_choices": [JUDGE]}
    for _ in range(MOST_UNTRAINED - 1):
        assert client.train([[nothing]]) == []
    assert client.refused("/_train_model", client.body([[nothing]]))[:2] == (422, "nothing_to_train")
    assert client.ask("/_get_step") == 0


def test_b08_a_step_that_fails_is_an_error_of_the_client(own: Callable[..., Wire]) -> None:
    client = Client(own())
    client.wire.trainer.fails = "the loss is not finite"
    pair = [client.trajectory(0.0, "policy"), client.trajectory(1.0, "policy")]
    status, code, said = client.refused("/_train_model", client.body([pair]))
    assert (status, code) == (500, "step_failed") and "the loss is not finite" in said


def test_b09_a_keyword_that_a_run_cannot_follow_is_refused_by_name_before_anything_is_trained(
    shared: Client,
) -> None:
    pair = [shared.trajectory(0.0), shared.trajectory(1.0)]
    before = shared.ask("/_get_step")
    for dev in ({"advantage_balance": 0.5}, {"scale_learning_rate_by_reward_std_dev": True}):
        status, code, said = shared.refused("/_train_model", shared.body([pair], **dev))
        assert (status, code) == (400, "settings_refused") and said.startswith(f"{next(iter(dev))}: ")
    assert shared.ask("/_get_step") == before
    assert shared.train([pair], epsilon=0.3, plot_tensors=True)


def test_b08_a_run_is_one_policy_with_one_name_and_one_base_model(own: Callable[..., Wire]) -> None:
    wire = own()
    client = Client(wire)
    other = {**client.model, "base_model": "Qwen/Qwen3-8B"}
    status, code, said = client.refused("/register", other)
    assert (status, code) == (400, "another_model") and "--model Qwen/Qwen3-8B" in said
    odd = client.post("/register", {**client.model, "base_model": "Qwen\x01/Qwen€\x7f"})
    assert (odd.status_code, "not Qwen?/Qwen??" in odd.headers["x-slipway-reason"]) == (400, True)
    client.ask("/register")
    assert client.refused("/register", {**client.model, "name": "agent-002"})[:2] == (409, "another_policy")
    prompted = {"name": "gpt-4.1", "project": "tests", "config": None, "trainable": False}
    client.ask("/register", prompted)
    assert wire.gateway.chat(model="gpt-4.1").status_code == 404, "what another model says is no policy's"
    assert client.post("/register", {"name": "a@1"}).status_code == 400
    wire.gateway.kill()
    wire.restart()
    assert wire.gateway.chat(model="agent-001").status_code == 200, "the name is known after a restart"
    again = client.refused("/register", {**client.model, "_internal_config": {"peft_args": {"r": 3}}})
    assert "lora_config.r: 3 is asked for" in again[2] and "--set train.lora.rank=3" in again[2]


def test_b08_the_best_is_pinned_by_what_was_logged_and_validations_are_the_runs(
    own: Callable[..., Wire],
) -> None:
    client = Client(own())
    client.ask("/register")
    for reward in (0.1, 0.9, 0.2):
        client.train([[client.trajectory(0.0), client.trajectory(1.0)]])
        groups = client.body([[client.trajectory(reward)]])
        client.ask("/_log", {**groups, "split": "val"})
        query = {"benchmark": "val/reward", "benchmark_smoothing": 1.0}
        client.ask("/_delete_checkpoints", params=query)
    pinned = [one["step"] for one in client.ask_get("/slipway/checkpoints") if one["pinned"]]
    assert pinned == [1, 2], "each was the best by then; the worse third is kept as the newest, no longer"
    scores = [(one["compile"], one["score"]) for one in client.ask_get("/slipway/validations")]
    assert scores == [("agent-001", reward) for reward in (0.1, 0.9, 0.2)]
    assert client.post("/close", {}).status_code == 200
    assert client.ask("/_get_step") == 3, "nothing was ended"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/register", {}),
        ("/register", {"name": 3}),
        ("/_train_model", {}),
        ("/_train_model", {"model": {"name": "agent-001", "base_model": "x", "trainable": False}}),
        ("/_log", {"model": {"name": "a", "trainable": False}, "split": "../up", "trajectory_groups": []}),
        ("/_log", {"model": {"name": "agent-001", "trainable": False}, "trajectory_groups": [[]]}),
        ("/_log", {"model": {"name": "a", "trainable": False}, "trajectory_groups": [{"trajectories": [3]}]}),
    ],
)  # fmt: skip
def test_b08_what_is_no_body_is_refused(shared: Client, path: str, body: Any) -> None:
    assert shared.post(path, body).status_code == 400


def test_b08_a_full_queue_is_waited_for_no_longer_than_the_runtime_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases = iter([("ready", None), ("failed", "the trainer is gone")])

    async def is_full(request: StepRequest) -> StepStatus:
        raise QueueFullError("8 steps wait")

    steps = SimpleNamespace(submit=is_full)
    runtime: Any = SimpleNamespace(steps=steps, phase=lambda: next(phases))
    monkeypatch.setattr(training, "AGAIN_SECONDS", 0.0)
    members = [Member(samples=["a:0"], reward=1.0), Member(samples=["b:0"], reward=0.0)]
    request = StepRequest(key="art:1", groups=[Group(id="1", members=members)])
    with pytest.raises(ApiError, match="the trainer is gone"):
        asyncio.run(training.Training(runtime, lambda *_: None)._submit(request))
