"""A small stand-in for a run's endpoint, for tests of the client alone: it speaks our routes over real HTTP.

It records each request, answers fixed completions, and counts a step's samples by their tags, as the runtime
does. It samples and trains nothing. `break_next` makes the next requests fail as a lost link does; `go` ends
it for good in the middle of whatever is asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from launcher.client.session import Session, connect
from launcher.client.wire import Patience
from runtime.shared.schema import RestoreRequest, RuntimeConfig, StepRequest, Validation
from runtime.shared.train_kwargs import Run, TrainKwargs, read
from tests.support.played_text import Matched

TOKEN = "a-token-of-the-test"
# An answer that ends so was cut off at its length limit.
CUT_OFF = "<cut off>"
FLAT = "no variance in its group"
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
class SmallRun:
    """The endpoint. Change `answer` at will; look at `asked`, `steps`, `restored`, `pinned`."""

    answer: Answer = field(default_factory=lambda: answering(french="bonjour"))
    asked: list[Asked] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    requests: dict[int, StepRequest] = field(default_factory=dict)
    validations: list[Validation] = field(default_factory=list)
    keeps_validations: bool = True
    pinned: list[str] = field(default_factory=list)
    # Pinned by a version's name, by what was compiled to it.
    named: list[str] = field(default_factory=list)
    # The checkpoint that was named best last, and whose.
    best: tuple[str, str] | None = None
    restored: list[str] = field(default_factory=list)
    posted: list[tuple[str, str | None]] = field(default_factory=list)
    run_id: str = "run-1"
    # What the run trains, by its name on the hub.
    hub_name: str = "Qwen/Qwen2.5-1.5B-Instruct"
    # What train_kwargs are held against, beside what every run has.
    config: dict[str, Any] = field(default_factory=dict)
    train_kwargs: list[dict[str, Any]] = field(default_factory=list)
    # Jobs of OpenAI's SDK by their ids: the job and its events, the newest first.
    tuned: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = field(default_factory=dict)
    # By version, the hash of its weights: those of a machine that was lost are never made again.
    weights: dict[int, str] = field(default_factory=dict)
    machine: int = 1
    # Versions after it were counted again, since a machine was lost: their numbers alone say nothing.
    reused_after: int | None = None
    # Whether what was trained is gone by the time that somebody asks for it to be kept.
    prunes: bool = False
    # What goes for what is pinned next.
    lets_go: list[str] = field(default_factory=list)
    version: int = 0
    client_state: dict[str, Any] | None = None
    break_next: list[int | str] = field(default_factory=list)
    fail_step: str | None = None
    refuse_empty: bool = True
    lost: set[str] = field(default_factory=set)
    # As the trainer does: samples of a group whose rewards are all the same teach nothing.
    drop_flat: bool = False
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
    # Which version it claims to have answered with, whatever was asked; None: the one that was named.
    claims: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        handler = type("Handler", (_Handler,), {"run": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

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

    def name_of(self, version: int) -> str:
        """The name that means this version's weights alone."""
        return f"policy@v{version}+{self.weights[version][:12]}"

    def go(self) -> None:
        """Away for good: whoever is connected is cut off, and nobody listens any more."""
        self._server.gone = True
        self._server.shutdown()
        self._server.server_close()

    def rewound(self, what: str) -> tuple[int, dict[str, Any]]:
        """The refusal of what only the lost machine knew."""
        status, body = _error(409, f"{what} was lost: the run was rewound to step {self.version}", "rewound")
        body["error"] |= {"step": self.version, "client_state": self.client_state}
        return status, body

    def close(self) -> None:
        if self._server.gone:
            return
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------- what the runtime would do

    def complete(self, asked: Asked) -> tuple[int, dict[str, Any], dict[str, str]]:
        with self.lock:
            version = self.version_of(asked.body["model"])
            asked = replace(asked, version=version)
            known = next((it for it in self.asked if it.tag("request") == asked.tag("request")), None)
            if known is None or asked.tag("request") is None:
                self.asked.append(asked)
            if version is None:
                return *_error(409, "different weights", "version_reused"), {}
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

    def version_of(self, model: str) -> int | None:
        """The version that answers to a name: `policy` is the newest, `base` the model before training.

        None where the name has the hash of other weights, or needs one and has none.
        """
        if self.claims is not None:
            return self.claims
        named = re.search(r"@v(\d+)(?:\+(\w+))?$", model)
        if named is None:
            return 0 if model == "base" else self.version
        version = int(named[1])
        if named[2] is None and self.reused_after is not None and version > self.reused_after:
            return None
        return version if self.weights.get(version, "").startswith(named[2] or "") else None

    def pin(self, name: str) -> tuple[int, Any]:
        version = self.version_of(name) if "@v" in name else int(name.removeprefix("step-"))
        if version is None:
            return _error(409, "different weights", "version_reused")
        if version not in self.steps or self.prunes:
            return _error(404, f"there is no checkpoint {name!r}", "not_found")
        (kept,) = [it for it in self.checkpoints() if it["version"] == version]
        (self.named if "@v" in name else self.pinned).append(kept["name"])
        return 200, kept | {"pinned": True, "let_go": self.lets_go}

    def step(self, request: StepRequest) -> tuple[int, dict[str, Any]]:
        for number, known in self.requests.items():
            if known.key == request.key:
                same = known == request
                return (202, self.steps[number]) if same else _error(409, "a different body", "key_reused")
        if self.lost & {member.rollout for group in request.groups for member in group.members}:
            return self.rewound("these rollouts")
        counts = self._counts(request)
        if request.examples:
            counts |= {"samples": len(request.examples), "trained": len(request.examples)}
        if self.refuse_empty and not counts["trained"] + counts["dropped"].get(FLAT, 0):
            status, body = _error(422, "no sample of this step can be trained", "nothing_to_train")
            body["error"]["counts"] = counts
            return status, body
        number = self._next()
        self.requests[number] = request
        self.client_state = request.client_state
        self.steps[number] |= {"key": request.key, "counts": counts, "metrics": self.metrics}
        if self.fail_step:
            self.steps[number] |= {"state": "failed", "error": self.fail_step, "version": None}
        return 202, self.steps[number]

    def restore(self, name: str, request: RestoreRequest) -> tuple[int, dict[str, Any]]:
        if self.prunes:
            return _error(404, f"there is no checkpoint {name!r}", "not_found")
        self.restored.append(name)
        self.client_state = request.client_state
        number = self._next()
        self.steps[number] |= {"key": request.key}
        return 202, self.steps[number]

    def _next(self) -> int:
        number = max(self.steps, default=0) + 1
        self.version = number
        self.weights[number] = hashlib.sha256(f"{self.machine}/{number}".encode()).hexdigest()
        self.steps[number] = {
            "id": number, "key": "", "state": "published", "version": number,
            "publication": {"sha256": self.weights[number]},
        }  # fmt: skip
        return number

    def _counts(self, request: StepRequest) -> dict[str, Any]:
        sampled: dict[tuple[str | None, str | None, str | None], int] = defaultdict(int)
        for it in self.asked:
            if it.tag("purpose") != "eval":
                sampled[it.tag("rollout"), it.tag("predictor"), it.tag("call")] += 1
        trained, dropped, samples, flat = 0, defaultdict[str, int](int), 0, 0
        for group in request.groups:
            is_flat = len({it.reward for it in group.members if it.reward is not None}) < 2
            flat += is_flat
            for member in group.members:
                if member.messages is not None:
                    continue  # counted below
                wanted = member.predictor or group.predictor
                found = sum(
                    count
                    for (rollout, predictor, call), count in sampled.items()
                    if rollout == member.rollout
                    and predictor == wanted
                    and (member.call is None or call == str(member.call))
                )
                samples += found
                if member.reward is None:
                    dropped[member.failure or "no reward"] += max(1, found)
                elif is_flat and self.drop_flat:
                    dropped[FLAT] += found
                else:
                    trained += found
        by_text, unknown = Matched(self.answered, self.taken).of(request.groups)
        samples, trained = samples + by_text + unknown, trained + by_text + unknown
        return {
            "retokenised": unknown,
            "groups": len(request.groups),
            "members": sum(len(group.members) for group in request.groups),
            "samples": samples,
            "trained": trained,
            "groups_without_variance": flat,
            "dropped": dict(dropped),
        }

    def status(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "phase": "ready",
            "model": "/models/tiny",
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
        """As the trainer's: a restore says of no tokens."""
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
        return _error(404, f"this run trains {self.hub_name}", "model_not_found")

    def read_train_kwargs(self, body: TrainKwargs) -> tuple[int, dict[str, Any]]:
        """By the runtime's own table."""
        self.train_kwargs.append(body.train_kwargs)
        if self.meaning:
            return 200, {"settings": {}, "sampling": {}, "notes": [], "refusals": []} | self.meaning
        places = {"run_id": self.run_id, "state_dir": "none", "socket_dir": "none"}
        config = RuntimeConfig.model_validate({**places, "model_path": self.hub_name, **self.config})
        asked = {"strict": body.strict, "steps": body.steps, "trainer": body.trainer}
        answer = read(body.train_kwargs, Run(config), **asked)
        return 200, answer.model_dump(mode="json")

    def checkpoints(self) -> list[dict[str, Any]]:
        return [
            {
                "name": f"step-{number:06d}",
                "step": number,
                "version": number,
                "created": 0.0,
                "bytes": 1,
                "weights": self.weights.get(number, ""),
            }
            for number in self.steps
        ]


def _error(status: int, message: str, code: str | None = None) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "an_error", "param": None, "code": code}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # as many clients at once as a step has rollouts
    gone = False


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with keep-alive, as the gateway's."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: in two, the second waits 40 ms for the first's ACK
    run: SmallRun

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        self._handle(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _handle(self, content: bytes | None) -> None:
        if isinstance(self.server, _Server) and self.server.gone:
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        path, asked = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        with self.run.lock:
            self.run.posted.append((path, headers.get("x-slipway-request")))
            trouble = self.run.break_next.pop(0) if self.run.break_next else None
        if isinstance(trouble, int):
            self._send(*_error(trouble, "not now"))
        elif trouble == "cut before":
            self.close_connection = True
        else:
            if content is None and path.startswith("/slipway/steps/"):
                self.run.wait_for(int(path.rpartition("/")[2]), asked.get("until") == ["committed"])
            status, body, extra = self._answer(path, headers, content)
            if path.endswith("/pin") and "best_of" in asked:
                self.run.best = (path.split("/")[-2], asked["best_of"][0])
            if trouble == "cut after" or (isinstance(self.server, _Server) and self.server.gone):
                self.close_connection = True
            else:
                self._send(status, body, extra)

    def _answer(
        self, path: str, headers: dict[str, str], content: bytes | None
    ) -> tuple[int, Any, Mapping[str, str]]:
        run = self.run
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return *_error(401, "wrong token"), {}
        if path == "/v1/chat/completions":
            return run.complete(Asked(headers, json.loads(content or b"")))
        if path.startswith("/v1/models"):
            return *run.models(path.removeprefix("/v1/models").strip("/")), {}
        with run.lock:
            return *self._training(path, content), {}

    def _training(self, path: str, content: bytes | None) -> tuple[int, Any]:
        run, parts = self.run, path.strip("/").split("/")
        match parts:
            case ["slipway", "status"]:
                return 200, run.status()
            case ["slipway", "steps"]:
                return run.step(StepRequest.model_validate_json(content or b""))
            case ["slipway", "steps", number]:
                known = run.steps.get(int(number))
                return (200, known) if known else run.rewound(f"step {number}")
            case ["slipway", "checkpoints"]:
                return 200, run.checkpoints()
            case ["slipway", "checkpoints", name, "pin"]:
                return run.pin(name)
            case ["slipway", "checkpoints", name, "restore"]:
                return run.restore(name, RestoreRequest.model_validate_json(content or b""))
            case ["slipway", "validations"]:
                run.validations.append(Validation.model_validate_json(content or b""))
                return (200, {}) if run.keeps_validations else _error(409, "it keeps no more")
            case ["slipway", "train_kwargs"]:
                return run.read_train_kwargs(TrainKwargs.model_validate_json(content or b""))
            case ["v1", "fine_tuning", "jobs", name, *what] if name in run.tuned:
                job, events = run.tuned[name]
                if what == ["cancel"]:
                    job["status"] = "cancelled"
                return 200, {"data": events} if what == ["events"] else job
            case ["slipway", "metrics"]:
                return 200, run.metric_lines()
        return _error(404, "no such route")

    def _send(self, status: int, body: Any, extra: Mapping[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(extra or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Tests print nothing."""
