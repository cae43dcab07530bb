"""B3: what is asked inside a rollout's block carries its name, whoever asks; all else is left as it is."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import re
import threading
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from launcher.client import ClientError, Session, group
from launcher.client.tracing import http_libraries
from launcher.client.wire import Endpoint
from tests.support.environment import REPOSITORY
from tests.support.small_run import PATIENCE, SmallRun

ROLLOUT, PREDICTOR, PURPOSE = "x-slipway-rollout", "x-slipway-predictor", "x-slipway-purpose"
PLACES: list[tuple[type, str]] = [
    (httpx.Client, "_send_single_request"),
    (httpx.AsyncClient, "_send_single_request"),
    (aiohttp.ClientSession, "_request"),
]
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
BODY = {"model": "policy", "messages": MESSAGES}


@dataclass
class Station:
    """An address that answers each request, or sends it elsewhere, and keeps its headers."""

    heard: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    elsewhere: str | None = None

    def __post_init__(self) -> None:
        handler = type("Handler", (_Handler,), {"station": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def session(self) -> Session:
        return Session(Endpoint(self.root, "a-key"), PATIENCE)

    @property
    def tags(self) -> list[str | None]:
        """Whose each request was."""
        return [headers.get(ROLLOUT) for _, headers in self.heard]

    def ours(self) -> set[str]:
        """The headers of ours that any request had."""
        return {name for _, headers in self.heard for name in headers if name.startswith("x-slipway")}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    station: Station
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        self.station.heard.append((self.path, {name.lower(): it for name, it in self.headers.items()}))
        message = {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
        }
        content = json.dumps(answer).encode()
        self.send_response(307 if self.station.elsewhere else 200)
        if self.station.elsewhere:
            self.send_header("location", f"{self.station.elsewhere}{self.path}")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Tests print nothing."""


@pytest.fixture(autouse=True)
def _no_prices_from_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture
def station() -> Iterator[Station]:
    it = Station()
    yield it
    it.close()
    assert _untouched()


@pytest.fixture
def other() -> Iterator[Station]:
    it = Station()
    yield it
    it.close()


_ORIGINALS = [getattr(*place) for place in PLACES]


def _untouched() -> bool:
    return [getattr(*place) for place in PLACES] == _ORIGINALS


def ask(station: Station, path: str = "/v1/chat/completions", **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    httpx.post(station.root + path, json=BODY, headers=named, trust_env=False)


def ask_by_openai(station: Station) -> None:
    with openai.OpenAI(base_url=f"{station.root}/v1", api_key="k", max_retries=0) as client:
        client.chat.completions.create(model="policy", messages=MESSAGES)


def ask_by_async_openai(station: Station) -> None:
    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=f"{station.root}/v1", api_key="k", max_retries=0) as client:
            await client.chat.completions.create(model="policy", messages=MESSAGES)

    asyncio.run(go())


def ask_by_litellm(station: Station) -> None:
    import litellm

    litellm.completion("openai/policy", MESSAGES, api_base=f"{station.root}/v1", api_key="k")


def ask_by_litellm_later(station: Station, provider: str = "openai") -> None:
    import litellm

    answer = litellm.acompletion(f"{provider}/policy", MESSAGES, api_base=f"{station.root}/v1", api_key="k")
    _one_loop().run(answer, context=contextvars.copy_context())


def ask_by_litellms_own_handler(station: Station) -> None:
    ask_by_litellm_later(station, "hosted_vllm")


def ask_by_aiohttp(station: Station) -> None:
    async def go() -> None:
        async with aiohttp.ClientSession() as session:
            await session.post(f"{station.root}/v1/chat/completions", json=BODY)

    asyncio.run(go())


@functools.cache
def _one_loop() -> asyncio.Runner:
    """For LiteLLM, which keeps connections and a task of its own, whatever loop it is in."""
    return asyncio.Runner()


@pytest.fixture(scope="module", autouse=True)
def _its_end() -> Iterator[None]:
    """A task that is left to the interpreter's end may bring it down."""
    yield
    _one_loop().close()


def ask_by_litellms_aiohttp(station: Station) -> None:
    import litellm

    url = f"{station.root}/v1/chat/completions"
    answer = litellm.acompletion("aiohttp_openai/policy", MESSAGES, api_base=url, api_key="k")
    _one_loop().run(answer, context=contextvars.copy_context())


CLIENTS = [
    ask,
    ask_by_openai,
    ask_by_async_openai,
    ask_by_litellm,
    ask_by_litellm_later,
    ask_by_litellms_own_handler,
    ask_by_aiohttp,
    ask_by_litellms_aiohttp,
]


@pytest.mark.process
@pytest.mark.parametrize("client", CLIENTS)
def test_b03_each_client_carries_the_name_inside_the_block_and_nothing_of_ours_outside(
    station: Station, other: Station, client: Callable[[Station], None]
) -> None:
    client(station)
    with station.session().rollout(predictor="solver", purpose="eval", untrainable="refuse") as rollout:
        client(station)
        client(other)
    client(station)
    assert station.tags == [None, rollout.id, None] and rollout.requests == 1
    tags = {name: it for name, it in station.heard[1][1].items() if name.startswith("x-slipway")}
    assert tags == {
        ROLLOUT: rollout.id, PREDICTOR: "solver", PURPOSE: "eval", "x-slipway-untrainable": "refuse"
    }  # fmt: skip
    assert len(other.heard) == 1 and not other.ours()


def test_b03_no_other_host_gets_our_headers_after_a_redirect(station: Station, other: Station) -> None:
    station.elsewhere = other.root

    async def later() -> None:
        async with httpx.AsyncClient(follow_redirects=True, trust_env=False) as client:
            await client.post(f"{station.root}/v1/chat/completions", json=BODY)
        async with aiohttp.ClientSession() as client:
            await client.post(f"{station.root}/v1/chat/completions", json=BODY)

    with station.session().rollout() as rollout:
        httpx.post(f"{station.root}/v1/chat/completions", json=BODY, follow_redirects=True, trust_env=False)
        asyncio.run(later())
    assert station.tags == [rollout.id] * 3 and len(other.heard) == 3
    assert not other.ours()


def test_b03_what_says_itself_whose_it_is_keeps_its_own(station: Station) -> None:
    with station.session().rollout(predictor="solver") as rollout:
        ask(station, x_slipway_rollout="another")
        ask(station, "/rollouts/a%20third/v1/chat/completions")
        ask(station, x_slipway_predictor="critic")
        ask(station, f"/rollouts/{rollout.id}/v1/chat/completions")
    assert station.tags == ["another", None, rollout.id, rollout.id]
    assert [headers.get(PREDICTOR) for _, headers in station.heard] == [None, None, "critic", "solver"]
    assert rollout.requests == 2


def test_b03_a_name_may_have_anything_that_an_address_can_have(station: Station) -> None:
    session = station.session()
    with session.rollout("q 7% #2?") as rollout:
        httpx.post(f"{rollout.base_url}/chat/completions", json=BODY, trust_env=False)
        assert rollout.requests == 1
    assert station.heard[0][0] == "/rollouts/q%207%25%20%232%3F/v1/chat/completions"
    for name in ("hotpot/7", " q", "é", "q\n", "q" * 129):
        with pytest.raises(ValueError, match="a rollout's name has"):
            session.rollout(name)


def test_b03_only_what_samples_is_tagged(station: Station) -> None:
    with station.session().rollout() as rollout:
        httpx.get(f"{station.root}/v1/models", trust_env=False)
        ask(station, "/slipway/steps")
        ask(station, "/v1/completions")
    assert station.tags == [None, None, rollout.id]


def test_b03_this_computer_has_one_port_whatever_it_calls_itself(station: Station, other: Station) -> None:
    with station.session().rollout() as rollout:
        for at in (station, other):
            httpx.post(
                at.root.replace("127.0.0.1", "localhost") + "/v1/chat/completions",
                json=BODY,
                trust_env=False,
            )
    assert station.tags == [rollout.id] and not other.ours()


# ------------------------------------------------------------------ whose block it is


@pytest.mark.process
def test_b03_tasks_and_threads_with_a_copied_context_belong_to_their_own_rollout(station: Station) -> None:
    session = station.session()

    async def agent(number: int) -> tuple[str, str]:
        async with session.rollout(f"r{number}") as rollout:
            async with openai.AsyncOpenAI(base_url=f"{station.root}/v1", api_key="k") as client:
                await asyncio.gather(
                    client.chat.completions.create(model=f"a{number}", messages=MESSAGES),
                    asyncio.to_thread(ask, station, x_of=f"b{number}"),
                )
            with ThreadPoolExecutor(1) as pool:
                pool.submit(contextvars.copy_context().run, ask, station, x_of=f"c{number}").result()
            assert rollout.requests == 3
        return rollout.id, f"{number}"

    async def together() -> None:
        await asyncio.gather(*(agent(number) for number in range(8)))

    asyncio.run(together())
    assert sorted(str(tag) for tag in station.tags) == sorted([f"r{number}" for number in range(8)] * 3)
    named = [(headers["x-of"], headers[ROLLOUT]) for _, headers in station.heard if "x-of" in headers]
    assert len(named) == 16 and all(of[1:] == rollout[1:] for of, rollout in named)
    assert session.astray == 0


@pytest.mark.process
def test_b03_a_thread_without_the_context_is_astray_and_it_is_said_once(
    station: Station, capsys: pytest.CaptureFixture[str]
) -> None:
    session = station.session()
    ask(station)
    with session.rollout() as rollout:
        ask(station)
        for _ in range(2):
            thread = threading.Thread(target=ask, args=(station,))
            thread.start()
            thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ask, station, x_slipway_purpose="eval").result()
            pool.submit(ask, station, "/rollouts/r1/v1/chat/completions").result()
    assert station.tags == [None, rollout.id, None, None, None, None]
    assert session.astray == 2 and rollout.requests == 1
    assert capsys.readouterr().err.count("from outside every rollout") == 1


def test_b03_blocks_inside_one_another_and_a_block_that_is_entered_again(station: Station) -> None:
    session = station.session()
    with session.rollout("outer") as outer:
        with session.rollout("inner"):
            ask(station)
            with outer:
                ask(station)
        ask(station)
    with outer:
        ask(station)
    assert station.tags == ["inner", "outer", "outer", "outer"]
    assert outer.requests == 3


def test_b03_each_of_two_runs_gets_the_name_of_its_own_rollout(station: Station, other: Station) -> None:
    with station.session().rollout("here"), other.session().rollout("there"):
        ask(station)
        ask(other)
    assert (station.tags, other.tags) == (["here"], ["there"])


def test_b03_what_outlives_its_block_is_nobodys(station: Station) -> None:
    session = station.session()

    async def go() -> None:
        leave = asyncio.Event()

        async def late() -> None:
            await leave.wait()
            await asyncio.to_thread(ask, station)

        async with session.rollout():
            ask(station)
            task = asyncio.create_task(late())
        async with session.rollout():
            leave.set()
            await task
            ask(station)

    asyncio.run(go())
    assert station.tags[1] is None and None not in (station.tags[0], station.tags[2])
    assert session.astray == 1


def test_b03_a_block_may_end_in_another_context_than_it_began_in(station: Station) -> None:
    session = station.session()

    async def turns() -> AsyncIterator[None]:
        async with session.rollout("generated"):
            ask(station)
            yield

    async def go() -> None:
        generator = turns()
        await asyncio.create_task(anext(generator))  # type: ignore[arg-type]
        await asyncio.create_task(generator.aclose())  # type: ignore[arg-type]
        ask(station)

    asyncio.run(go())
    assert station.tags == ["generated", None] and _untouched()


# ------------------------------------------------------------------ the hook


@pytest.mark.process
def test_b03_nothing_is_in_place_before_the_first_block_or_after_the_last(station: Station) -> None:
    session = station.session()
    assert _untouched()
    inside, go_on = threading.Barrier(9), threading.Event()

    def block() -> None:
        with session.rollout():
            inside.wait(30)
            ask(station)
            go_on.wait(30)

    threads = [threading.Thread(target=block) for _ in range(8)]
    for thread in threads:
        thread.start()
    inside.wait(30)
    assert not _untouched()
    with pytest.raises(ZeroDivisionError), session.rollout():
        raise ZeroDivisionError
    assert not _untouched()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert _untouched() and None not in station.tags and len(set(station.tags)) == 8


def test_b03_whoever_wraps_the_clients_meanwhile_is_left_in_peace(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, seen = station.session(), []
    owner, name = PLACES[0]
    with session.rollout() as first:
        ours = getattr(owner, name)

        def wrapped(client: Any, request: Any) -> Any:
            seen.append(request.headers.get(ROLLOUT))
            return ours(client, request)

        monkeypatch.setattr(owner, name, wrapped)
        ask(station)
    ask(station)
    assert getattr(owner, name) is wrapped
    with session.rollout() as second:
        ask(station)
    assert getattr(owner, name) is wrapped
    assert station.tags == [first.id, None, second.id] and seen == [None, None, second.id]
    assert (first.requests, second.requests, session.astray) == (1, 1, 0)
    monkeypatch.undo()
    setattr(owner, name, _ORIGINALS[0])  # what the monkey put back is ours, which does nothing


def test_b03_a_library_that_cannot_be_tagged_is_said_and_nothing_is_touched(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_libraries, "_HTTPX_SEND", "_of_another_release")
    with pytest.raises(ClientError, match="httpx") as raised, station.session().rollout():
        raise AssertionError("not entered")
    assert raised.value.hint and "rollout_url" in raised.value.hint
    assert _untouched()


def test_b04_the_base_install_pins_no_sdk() -> None:
    """It must live beside any release of OpenAI's SDK, and of what an agent is made with."""
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=!~ \[]", it, maxsplit=1)[0] for it in needed}
    assert not names & {"openai", "litellm", "dspy", "httpx2", "tiktoken", "langchain-core"}
    assert {"httpx>=0.27", "pydantic>=2.9"} <= {*needed}


# ------------------------------------------------------------------ rewards


def test_b03_rollouts_with_their_rewards_are_a_group_of_a_step() -> None:
    run = SmallRun()
    session = run.session()
    made = []
    for number in range(4):
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            try:
                with session.rollout() as rollout:
                    client.chat.completions.create(model="policy", messages=MESSAGES)
                    if number > 1:
                        raise TimeoutError("of the agent's tool")
                rollout.reward = number
            except TimeoutError:
                assert rollout.failed == "TimeoutError: of the agent's tool"
        made.append(rollout)
    made[3].reward = 0.5  # ended by an exception, and yet worth something
    status = session.step([group("q1", made)])
    assert (status.counts.samples, status.counts.trained) == (4, 3)
    assert status.counts.dropped == {"ended by TimeoutError": 1}
    assert session.step([group("q1", {made[0].id: 1.0, made[1].id: 0.0})]).counts.trained == 2
    run.close()


def test_b03_an_evaluation_is_never_trained_whichever_way_it_asked() -> None:
    run = SmallRun()
    session = run.session()
    rollouts = [session.rollout(purpose="eval"), session.rollout()]
    for rollout in rollouts:
        named = {ROLLOUT: rollout.id}  # and no more, as its address says it
        with openai.OpenAI(
            base_url=session.base_url, api_key=session.api_key, default_headers=named
        ) as client:
            client.chat.completions.create(model="policy", messages=MESSAGES)
        rollout.reward = 1.0
    counts = session.step([group("q1", rollouts)]).counts
    assert (counts.trained, counts.dropped) == (1, {"evaluation": 1})
    run.close()


def test_b03_a_rollout_that_asked_nothing_is_said(
    station: Station, other: Station, capsys: pytest.CaptureFixture[str]
) -> None:
    session = station.session()
    for _ in range(2):
        with session.rollout():
            ask(other)
    assert capsys.readouterr().err.count("asked the run nothing") == 1


def test_b03_a_dspy_program_without_predictors_of_ours_is_tagged_as_well() -> None:
    import dspy

    from launcher.client import PolicyLM

    run = SmallRun()
    session = run.session()
    with dspy.context(lm=PolicyLM(session)):
        with session.rollout() as rollout:
            dspy.Predict("english -> french")(english="cat")
        dspy.Predict("english -> french")(english="dog")
    assert [(asked.tag("rollout"), asked.tag("purpose")) for asked in run.asked] == [
        (rollout.id, None),
        (None, "eval"),
    ]
    assert rollout.requests == 1
    run.close()


def test_b03_what_a_request_leads_to_in_this_process_is_tagged_as_well(station: Station) -> None:
    """An agent behind a web application that its test client calls without a network."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{station.root}/v1", api_key="k", max_retries=0) as client:
            await client.chat.completions.create(model="policy", messages=MESSAGES)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def go() -> None:
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://application") as client:
            await client.post("/ask")

    with station.session().rollout() as rollout:
        asyncio.run(go())
    assert station.tags == [rollout.id] and rollout.requests == 1
