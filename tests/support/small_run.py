"""A small stand-in for a run's endpoint, for tests of the client alone: it speaks our routes over real HTTP.

It records each request and answers fixed completions; it samples and trains nothing. `break_next` makes the
next requests fail as a lost link does; `go` ends it for good in the middle of whatever is asked.

Neighbours: `small_door.py` is its HTTP, `small_versions.py` has the versions it served, and `small_counts.py`
counts the samples of a step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.client.session import Session, connect
from launcher.client.wire import Patience
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.schema import RestoreRequest, StepRequest, Validation
from runtime.shared.train_kwargs import RunContext, TrainKwargsRequest, read
from tests.support.played_text import Matched
from tests.support.small_counts import FLAT, counts_of
from tests.support.small_door import Door, Reply, Request, error
from tests.support.small_versions import SmallVersions

TOKEN = "a-token-of-the-test"
# An answer that ends so was cut off at its length limit.
CUT_OFF = "<cut off>"
# For threads: a test that fails must not wait for its real patience.
PATIENCE = Patience(answer_seconds=20.0, away_seconds=5.0)


@dataclass(frozen=True)
class Asked:
    """One chat completion that was asked for."""

    headers: dict[str, str]
    body: dict[str, Any]
    # The policy that answers it.
    version: int | None = None

    def tag(self, name: str) -> str | None:
        return self.headers.get(f"x-slipway-{name}")

    @property
    def user(self) -> str:
        return self.body["messages"][-1]["content"]


Answer = Callable[[Asked], str | tuple[int, dict[str, Any]]]


def answering(**fields: str) -> Answer:
    """Answers in ChatAdapter's form, the same to everyone."""
    sections = [f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()]
    text = "\n\n".join([*sections, "[[ ## completed ## ]]"])
    return lambda asked: text


@dataclass
class SmallRun(SmallVersions):
    """The endpoint. Change `answer` at will; look at `asked`, `steps`, `restored`, `pinned`."""

    answer: Answer = field(default_factory=lambda: answering(french="bonjour"))
    asked: list[Asked] = field(default_factory=list)
    requests: dict[int, StepRequest] = field(default_factory=dict)
    validations: list[Validation] = field(default_factory=list)
    keeps_validations: bool = True
    posted: list[tuple[str, str | None]] = field(default_factory=list)
    run_id: str = "run-1"
    model_path: str = "/models/tiny"
    # What the run trains, by its name on the hub.
    hub_name: str = "Qwen/Qwen2.5-1.5B-Instruct"
    # What train_kwargs are held against, beside what every run has.
    config: dict[str, Any] = field(default_factory=dict)
    train_kwargs: list[dict[str, Any]] = field(default_factory=list)
    # Jobs of OpenAI's SDK by their ids: the job and its events, the newest first.
    tuned: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = field(default_factory=dict)
    break_next: list[int | str] = field(default_factory=list)
    fail_step: str | None = None
    refuse_empty: bool = True
    lost: set[str] = field(default_factory=set)
    # As the runtime does: samples of a group whose rewards are all the same teach nothing, and a step of such
    # groups alone is empty.
    drop_flat: bool = False
    # By its key, what an empty step was answered.
    empty: dict[str, dict[str, Any]] = field(default_factory=dict)
    # The version after which the newest of them came, if none was made since.
    emptied_at: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # Of its `train.` keys, those that were said.
    settings: dict[str, Any] = field(default_factory=dict)
    # What it was answered with, in order: members given as text are found among these, each once.
    answered: list[tuple[Asked, str]] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    # What the run says of itself: how old a sample may be, and how many its engines take at a time.
    max_staleness: int | None = None
    places: int | None = None
    # Before it says what became of a step: once it is committed, where that is asked for.
    before_wait: Callable[[int], None] = lambda step: None
    # Before it says that a step's version is served, where that is asked for.
    before_served: Callable[[int], None] = lambda step: None
    # What it says that train_kwargs mean, in the place of the runtime's table.
    meaning: dict[str, Any] = field(default_factory=dict)
    # Steps of which somebody has asked whether they are committed.
    committed: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._door = Door(self.handle)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._door.port}/v1"

    def wait_for(self, number: int, committed: bool) -> None:
        """Before it says what became of a step."""
        if committed or number not in self.committed:
            self.before_wait(number)
        if committed:
            self.committed.add(number)
        else:
            self.before_served(number)

    def session(self) -> Session:
        return connect(self.base_url, TOKEN, PATIENCE)

    def lose_machine(self, to_step: int) -> None:
        """Be another machine, begun at `to_step`: later steps and all rollouts so far are unknown to it."""
        self.lost |= {it.tag("rollout") or "" for it in self.asked} - {""}
        self.machine += 1
        for number in [number for number in self.steps if number > to_step]:
            del self.steps[number]
            self.requests.pop(number, None)
        self.version = to_step
        self.reused_after = min(to_step, to_step if self.reused_after is None else self.reused_after)
        self.client_state = self.requests[to_step].client_state if to_step else None

    def go(self) -> None:
        """Away for good: whoever is connected is cut off, and nobody listens any more."""
        self._door.go()

    def rewound(self, what: str) -> tuple[int, dict[str, Any]]:
        """The refusal of what only the lost machine knew."""
        status, body = error(409, f"{what} was lost: the run was rewound to step {self.version}", "rewound")
        body["error"] |= {"step": self.version, "client_state": self.client_state}
        return status, body

    def close(self) -> None:
        self._door.close()

    # ------------------------------------------------------------- what the runtime would do

    def complete(self, asked: Asked) -> tuple[int, dict[str, Any], dict[str, str]]:
        with self.lock:
            version = self.version_of(asked.body["model"])
            asked = replace(asked, version=version)
            known = next((it for it in self.asked if it.tag("request") == asked.tag("request")), None)
            if known is None or asked.tag("request") is None:
                self.asked.append(asked)
            if version is None:
                return *error(409, "different weights", "version_reused"), {}
        answer = self.answer(asked)
        if not isinstance(answer, str):
            return answer[0], answer[1], {}
        name = f"policy@v{version}"
        text = answer.removesuffix(CUT_OFF)
        with self.lock:
            self.answered.append((asked, text))
        message = {"role": "assistant", "content": text}
        reason = "stop" if text == answer else "length"
        body = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": name,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": len(text.split()),
                "total_tokens": 7 + len(text.split()),
            },
        }
        return 200, body, {"x-slipway-policy-version": str(version)}

    def step(self, request: StepRequest) -> tuple[int, dict[str, Any]]:
        for number, known in self.requests.items():
            if known.key == request.key:
                same = known == request
                return (202, self.steps[number]) if same else error(409, "a different body", "key_reused")
        if self.lost & {member.rollout for group in request.groups for member in group.members}:
            return self.rewound("these rollouts")
        texts = Matched(self.answered, self.taken)
        counts = counts_of(request, self.asked, texts, drops_flat=self.drop_flat)
        if self.refuse_empty and not counts["trained"] + counts["dropped"].get(FLAT, 0):
            status, body = error(422, "no sample of this step can be trained", "nothing_to_train")
            body["error"]["counts"] = counts
            return status, body
        if not counts["trained"] and counts["dropped"].get(FLAT):
            why = f"nothing of this step can be learned: {counts['dropped'][FLAT]} {FLAT}"
            told = {"id": 0, "key": request.key, "state": "empty", "counts": counts, "error": why}
            if request.client_state is not None:
                self.client_state, self.emptied_at = request.client_state, self.version
            return 202, self.empty.setdefault(request.key, told)
        number = self.next_step()
        self.requests[number] = request
        self.client_state = request.client_state
        self.steps[number] |= {"key": request.key, "counts": counts, "metrics": self.metrics}
        if self.fail_step:
            self.steps[number] |= {"state": "failed", "error": self.fail_step, "version": None}
        return 202, self.steps[number]

    def status(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "phase": "ready",
            "model": self.model_path,
            "served_name": "policy",
            "version": self.version,
            "step": self.version,
            "client_state": self.client_state,
            "last_metrics": self._last_metrics(),
            "settings": self.settings,
            "max_staleness": self.max_staleness,
            "places": self.places,
        }

    def _last_metrics(self) -> dict[str, float]:
        """As the runtime's: a restore says of no tokens, an empty step of 0."""
        if self.emptied_at == self.version:
            return {"trained_tokens": 0.0}
        counts = self.steps.get(self.version, {}).get("counts")
        return {} if counts is None else {"trained_tokens": float(counts["trained"])}

    def metric_lines(self) -> list[dict[str, Any]]:
        """As `metrics.jsonl` has them."""
        return [
            {
                "step": number,
                "version": number,
                "kind": "train" if number in self.requests else "restore",
                "counts": step.get("counts", {}),
                "metrics": step.get("metrics", {}),
            }
            for number, step in self.steps.items()
        ]

    def models(self, name: str = "") -> tuple[int, dict[str, Any]]:
        """Those that answer, or the one of this name."""
        if not name:
            return 200, {
                "object": "list",
                "data": [{"id": it, "object": "model"} for it in ("policy", "base")],
            }
        if name.removeprefix("openai/").removeprefix("arbor:") in ("policy", "base", self.hub_name):
            return 200, {"id": name, "object": "model"}
        return error(404, f"this run trains {self.hub_name}", "model_not_found")

    def read_train_kwargs(self, body: TrainKwargsRequest) -> tuple[int, dict[str, Any]]:
        """By the runtime's own table."""
        self.train_kwargs.append(body.train_kwargs)
        if self.meaning:
            return 200, {"settings": {}, "sampling": {}, "notes": [], "refusals": []} | self.meaning
        places = {"run_id": self.run_id, "state_dir": "none", "socket_dir": "none"}
        config = RuntimeConfig.model_validate({**places, "model_path": self.hub_name, **self.config})
        asked = {"strict": body.strict, "steps": body.steps, "trainer": body.trainer}
        answer = read(body.train_kwargs, RunContext(config), **asked)
        return 200, answer.model_dump(mode="json")

    # ------------------------------------------------------------- its routes

    def handle(self, request: Request) -> Reply | None:
        """What a request is answered; None: the connection is lost."""
        with self.lock:
            self.posted.append((request.path, request.headers.get("x-slipway-request")))
            trouble = self.break_next.pop(0) if self.break_next else None
        if isinstance(trouble, int):
            return *error(trouble, "not now"), {}
        if trouble == "cut before":
            return None
        if request.content is None and request.path.startswith("/slipway/steps/"):
            self.wait_for(int(request.path.rpartition("/")[2]), request.query.get("until") == ["committed"])
        reply = self._answer(request)
        if request.path.endswith("/pin") and "best_of" in request.query:
            self.best = (request.path.split("/")[-2], request.query["best_of"][0])
        return None if trouble == "cut after" else reply

    def _answer(self, request: Request) -> Reply:
        path, content = request.path, request.content or b""
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return *error(401, "wrong token"), {}
        if path == "/v1/chat/completions":
            return self.complete(Asked(request.headers, json.loads(content)))
        if path.startswith("/v1/models"):
            return *self.models(path.removeprefix("/v1/models").strip("/")), {}
        with self.lock:
            return *self._training(path.strip("/").split("/"), content), {}

    def _training(self, parts: list[str], content: bytes) -> tuple[int, Any]:
        match parts:
            case ["slipway", "status"]:
                return 200, self.status()
            case ["slipway", "steps"]:
                return self.step(StepRequest.model_validate_json(content))
            case ["slipway", "steps", number]:
                known = self.steps.get(int(number))
                return (200, known) if known else self.rewound(f"step {number}")
            case ["slipway", "checkpoints"]:
                return 200, self.checkpoints()
            case ["slipway", "checkpoints", name, "pin"]:
                return self.pin(name)
            case ["slipway", "checkpoints", name, "restore"]:
                return self.restore(name, RestoreRequest.model_validate_json(content))
            case ["slipway", "validations"]:
                self.validations.append(Validation.model_validate_json(content))
                return (200, {}) if self.keeps_validations else error(409, "it keeps no more")
            case ["slipway", "train_kwargs"]:
                return self.read_train_kwargs(TrainKwargsRequest.model_validate_json(content))
            case ["v1", "fine_tuning", "jobs", name, *what] if name in self.tuned:
                job, events = self.tuned[name]
                if what == ["cancel"]:
                    job["status"] = "cancelled"
                return 200, {"data": events} if what == ["events"] else job
            case ["slipway", "metrics"]:
                return 200, self.metric_lines()
        return error(404, "no such route")
