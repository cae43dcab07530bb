"""Must hold whatever is asked: no failure of ours or the engine's, no empty answer, nothing lost or grown.

hostile.py draws the requests; here they are sent to a real gateway in front of a real engine, sixteen at a
time, and every answer is judged.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from runtime.gateway.samples.samples import SampleStore
from runtime.shared import process_table
from runtime.shared.event_streams import COMMENT_END
from tests.runtime.adapters import commit, write_adapter
from tests.runtime.conftest import RunningEngine, forget
from tests.runtime.gateway_process import TOKEN, Gateway
from tests.runtime.hostile import Ask, asks, combinations, dialect_asks, drawn, training_calls
from tests.runtime.recorded import sampled
from tests.support.waiting import wait_until

AT_ONCE = 16
# The slowest request the fuzz may hold up anybody with: a grammar's compilation is bounded by 5 s.
SLOWEST_SECONDS = 180.0
GROWTH_MIB = {"gateway": 16, "engine": 64}
FINISHED = {"stop", "length", "tool_calls", "repetition"}


@dataclass
class Seen:
    """What came of many requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def add(self, ask: Ask, seconds: float, status: int, body: bytes) -> None:
        self.statuses[status] += 1
        if seconds > self.slowest[0]:
            self.slowest = (round(seconds, 2), str(ask)[:300])
        if said := verdict(ask, status, body):
            self.wrong.append(f"{status} {said}\n  {ask}\n  -> {body[:500].decode(errors='replace')}")


def verdict(ask: Ask, status: int, body: bytes) -> str | None:
    """What is wrong with an answer; None when it may be given."""
    if ask.cut != "no":
        return None
    try:
        if status == 200 and ask.path in ("/v1/responses", "/v1/messages"):
            return _wrong_in_dialect(ask.path, body)
        if status == 200 and ask.path == "/inference/v1/generate":
            return _wrong_with_stream(body) if body.startswith(b"data: ") else _wrong_in_tokens(body)
        if status == 200 and ask.path.endswith("completions"):
            return (
                _wrong_with_stream(body) if body.startswith(b"data: ") else _wrong_with(ask, json.loads(body))
            )
        said = json.loads(body)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"not an answer: {error!r}"
    if status in (200, 202):
        return None
    if not 400 <= status < 500:
        return "neither an answer nor the client's mistake"
    if not (said["error"]["message"] and said["error"]["type"]):
        return "an error that says nothing"
    return "a failure nobody has a rule for" if said["error"].get("code") == "request_failed" else None


def _wrong_with(ask: Ask, answer: dict[str, Any]) -> str | None:
    body = json.loads(ask.content)
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    expected = (body.get("n") or 1) * (len(prompt) if several else 1)
    if [choice["index"] for choice in answer["choices"]] != list(range(expected)):
        return f"not {expected} choices"
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        called = choice.get("message", {}).get("tool_calls")
        if not isinstance(text, str) and not called:
            return "an answer without text"
        if choice["finish_reason"] not in FINISHED:
            return f"finished by {choice['finish_reason']!r}"
    return None if answer["usage"]["completion_tokens"] > 0 else "no token"


def _wrong_in_dialect(path: str, body: bytes) -> str | None:
    """A whole answer, or events that end as this dialect's do."""
    if body.startswith(b"event: "):
        last = json.loads(body.removesuffix(COMMENT_END).split(b"\n\n")[-1].split(b"data: ", 1)[1])
        ended = ("response.completed", "response.incomplete", "message_stop")
        return None if last["type"] in ended else f"a stream that ends with {last['type']}"
    said = json.loads(body)
    if path == "/v1/messages":
        return None if said["stop_reason"] and said["usage"]["output_tokens"] > 0 else "no message"
    return None if said["output"] and said["usage"]["output_tokens"] > 0 else "no output"


def _wrong_in_tokens(body: bytes) -> str | None:
    choices = json.loads(body)["choices"]
    whole = all(choice["token_ids"] and choice["finish_reason"] in FINISHED for choice in choices)
    return None if choices and whole else "not whole choices"


def _wrong_with_stream(body: bytes) -> str | None:
    *events, last, nothing = body.split(b"\n\n")
    if (last, nothing) != (b"data: [DONE]", b""):
        return "a stream without its end"
    parts = [json.loads(event.removeprefix(b"data: ")) for event in events]
    ended = {c["index"]: c["finish_reason"] for p in parts for c in p["choices"] if c["finish_reason"]}
    begun = {choice["index"] for part in parts for choice in part["choices"]}
    return None if begun and begun == ended.keys() and set(ended.values()) <= FINISHED else f"ended {ended}"


async def send(door: Path, ask: Ask) -> tuple[int, bytes]:
    """One request over a connection of its own; (0, b"") when the client hangs up."""
    reader, writer = await asyncio.open_unix_connection(str(door))
    try:
        headers = {"host": "x", "authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        headers |= {"content-length": str(len(ask.content))} | ask.headers
        lines = [f"{ask.method} {quote(ask.path, safe='/%?=&:@!$()*+,;~')} HTTP/1.1", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        content = ask.content[: len(ask.content) // 2] if ask.cut == "in the body" else ask.content
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content)
        if ask.cut in ("in the body", "before the answer"):
            await asyncio.wait_for(writer.drain(), SLOWEST_SECONDS)
            return 0, b""
        if ask.cut == "in the answer":
            await asyncio.wait_for(reader.read(300), SLOWEST_SECONDS)
            return 0, b""
        answer = await asyncio.wait_for(reader.read(), 2 * SLOWEST_SECONDS)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    chunked = b"transfer-encoding: chunked" in head.lower()
    return int(head.split(b" ", 2)[1]), _unchunked(body) if chunked else body


def _unchunked(body: bytes) -> bytes:
    """The content of a chunked body; a cut one is as long as it came."""
    found, rest = [], body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(found)


async def send_all(door: Path, requests: list[Ask]) -> Seen:
    seen, left = Seen(), iter(requests)

    async def worker() -> None:
        for ask in left:
            begun = time.monotonic()
            try:
                status, body = await send(door, ask)
            except (OSError, IndexError, TimeoutError) as error:
                seen.wrong.append(f"{error!r}\n  {ask}")
                continue
            seen.add(ask, time.monotonic() - begun, status, body)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return seen


@dataclass(frozen=True)
class Fuzzed:
    """A gateway that serves the base and one adapter, and what must be as before in the end."""

    gateway: Gateway
    engine: RunningEngine

    @property
    def door(self) -> Path:
        return Path(self.gateway.config["socket_dir"]) / "gateway.sock"

    def words(self) -> dict[str, Any]:
        """A usual request's answer under every version: text, ids and logprobs."""
        said = {}
        for model in ("base", "policy@v1"):
            answer = self.gateway.chat(
                model=model, temperature=0, max_tokens=16, logprobs=True, return_token_ids=True
            ).json()
            (choice,) = answer["choices"]
            tokens = [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]]
            said[model] = (choice["message"]["content"], choice["token_ids"], tokens)
        return said

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of the gateway, and of the engine's processes together."""
        engine = [self.engine.pid, *process_table.descendants(self.engine.pid)]
        of = {"gateway": [self.gateway.process.pid], "engine": engine}
        return {name: sum(map(_resident_mib, pids)) for name, pids in of.items()}


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.fixture(scope="module")
def fuzzed(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzzed")
    adapter = write_adapter(folder / "adapter", engine.model, seed=1)
    sequence = list(range(20, 60))
    commit(folder / "checkpoints", engine.model, adapter, version=1, sequence=sequence, prompt=20)
    gateway = Gateway(folder, engine.socket, engine.model).until_ready()
    wait_until(lambda: gateway.status()["version"] == 1)
    yield Fuzzed(gateway, engine)
    gateway.stop()
    forget(engine, "policy")


def fuzz(fuzzed: Fuzzed, requests: list[Ask]) -> Seen:
    """Send them all; what must hold afterwards is asserted here."""
    before, engine_pid = fuzzed.words(), fuzzed.engine.pid
    core = process_table.descendants(engine_pid)
    seen = asyncio.run(send_all(fuzzed.door, requests))
    # By now every block of the prefix cache has been touched, every module loaded: what grows, leaks.
    memory = fuzzed.memory_mib()
    again = asyncio.run(send_all(fuzzed.door, requests[::2]))
    grown = {name: round(now - memory[name], 1) for name, now in fuzzed.memory_mib().items()}
    print(f"\n{seen.statuses} grown {grown} MiB of {memory} slowest {seen.slowest}")
    wrong = seen.wrong + again.wrong
    assert not wrong, f"{len(wrong)} of {len(requests)}:\n" + "\n".join(wrong[:20])
    assert (fuzzed.engine.pid, process_table.descendants(engine_pid)) == (engine_pid, core), (
        "an engine was lost"
    )
    assert fuzzed.gateway.process.poll() is None
    assert fuzzed.gateway.status()["phase"] == "ready"
    assert fuzzed.words() == before
    assert max(seen.slowest[0], again.slowest[0]) < SLOWEST_SECONDS
    assert all(grown[name] < GROWTH_MIB[name] for name in grown), grown
    answered, refused = seen.statuses[200], sum(seen.statuses[status] for status in range(400, 500))
    assert min(answered, refused) > sum(seen.statuses.values()) / 5, "the fuzz no longer asks for both"
    return seen


@pytest.mark.slow
def test_two_thousand_requests_of_any_kind_hurt_nothing(fuzzed: Fuzzed) -> None:
    fuzz(fuzzed, asks(2000, 3))


@pytest.mark.slow
def test_three_hundred_requests_of_other_dialects_hurt_nothing(fuzzed: Fuzzed) -> None:
    fuzz(fuzzed, dialect_asks(300, 3))


@pytest.mark.long
@pytest.mark.parametrize("number", range(200, 203))
def test_many_more_requests_of_other_dialects_hurt_nothing(fuzzed: Fuzzed, number: int) -> None:
    fuzz(fuzzed, dialect_asks(4000, number))


@pytest.mark.long
@pytest.mark.parametrize("number", range(100, 110))
def test_many_more_requests_of_any_kind_hurt_nothing(fuzzed: Fuzzed, number: int) -> None:
    fuzz(fuzzed, asks(5000, number))


@pytest.mark.slow
def test_g24_no_call_of_a_training_route_gets_out_of_the_runs_folder_or_fails(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples")
    for index in range(1, 9):
        sampled(store, f"r{index}", 0)
    gateway = Gateway(tmp_path, None, tmp_path)
    try:
        door = Path(gateway.config["socket_dir"]) / "gateway.sock"
        seen = asyncio.run(send_all(door, drawn(training_calls(), 300, 5)))
        assert not seen.wrong, f"{len(seen.wrong)}:\n" + "\n".join(seen.wrong[:20])
        for path in ("status", "steps", "checkpoints", "metrics"):
            assert gateway.http.get(f"/slipway/{path}").status_code == 200, path
        assert {path.name for path in tmp_path.iterdir()} <= {
            "samples", "steps", "checkpoints", "lease", "gateway.log", "runtime.json", "logs",
            "admission.json", "files", "fine_tuning", "validations.jsonl", "empty_steps.jsonl",
        }  # fmt: skip
        said = (path.relative_to(tmp_path / "logs") for path in (tmp_path / "logs").rglob("*.*"))
        texts = r"rollouts/(step-\d{6}|empty-\d{6}-\d{2}|validation-\d{6}-[\w.-]{1,64})\.jsonl"
        assert all(re.fullmatch(texts, str(path)) for path in said)
    finally:
        gateway.stop()


def test_the_same_seed_draws_the_same_requests() -> None:
    assert drawn(combinations(), 50, 7) == drawn(combinations(), 50, 7)
