"""Talks to one engine over its Unix socket.

Neighbours: server.py is the other end; the gateway forwards completions with `post`, version_check.py loads,
verifies and scores adapters. Every call is bounded; every failure is an EngineError.
Knows nothing of versions or samples, and judges no logprob.

    EngineError                 the engine answered, and not well: `status`, `message`
    └── EngineUnreachableError       it did not answer: no socket, connection lost, too slow
"""

from __future__ import annotations

import json
import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from runtime.engine.command import BASE_NAME, KEEP_ALIVE_SECONDS, LOGPROBS_MODE, SCORING_PRIORITY
from runtime.gateway.engines import prefix_cache
from runtime.gateway.engines.prefix_cache import CacheUse

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_HEALTH_SECONDS = 5.0
# Loading, verifying and scoring wait for the engine step in progress, which may be a long prefill.
CONTROL_SECONDS = 60.0
# An idle connection is closed here, long before the engine would: a request that meets an engine's close is
# lost, and it is unknown whether it was read.
_IDLE_SECONDS = KEEP_ALIVE_SECONDS / 10
# The longest silence of a completion: the time of a whole answer, if it is not streamed.
_COMPLETION_SECONDS = 1800.0
_JSON = {"content-type": "application/json"}


class EngineError(Exception):
    """The engine refused or failed. `status` is the HTTP status, 0 if there was no answer; `answer` is its
    body."""

    def __init__(self, engine: str, status: int, message: str, answer: bytes = b"") -> None:
        super().__init__(f"{engine}: {message}")
        self.status = status
        self.message = message
        self.answer = answer


class EngineUnreachableError(EngineError):
    """No answer: the socket is not there, the connection broke, or the time ran out."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(engine, 0, message)


@dataclass(frozen=True)
class AdapterReport:
    """An engine's adapter, compared with the file on disk (worker.py).

    `modules`: how many the engine will multiply with; `expected`: how many the file has; `mismatched`: the
    tensors that differ, one sentence each; `sha256`: of the file the engine read.
    """

    modules: int
    expected: int
    mismatched: tuple[str, ...]
    sha256: str

    @property
    def exact(self) -> bool:
        """Every tensor of the file is in the engine, and nothing else is."""
        return self.modules == self.expected > 0 and not self.mismatched


@dataclass(frozen=True)
class EngineFacts:
    """Facts that an engine reports once. None: not reported.

    `context_length`: the longest sequence it takes, in tokens; `first_token`: the token (BOS) that its
    tokenizer puts before every text, if any.
    """

    context_length: int | None = None
    first_token: int | None = None


UNKNOWN = EngineFacts()


class EngineClient:
    """One engine. Use it from one event loop; `close` when done."""

    def __init__(self, socket: Path, control_seconds: float = CONTROL_SECONDS) -> None:
        self.socket = socket
        self.name = socket.stem
        self._control_seconds = control_seconds
        self._session: aiohttp.ClientSession | None = None
        self._mode_is_right = False
        self._context_length: int | None = None
        self.facts = UNKNOWN

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def post(self, path: str, content: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The hot path: `async with client.post(path, json_bytes) as response`, streamed or not.

        Raises aiohttp's errors (ClientError, TimeoutError): the caller decides whether to retry.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_COMPLETION_SECONDS
        )
        return self._open().post(f"http://engine{path}", data=content, headers=_JSON, timeout=timeout)

    async def health(self) -> bool:
        """Whether it answers, and returns the logprobs we train on (C8: asked of each engine that starts)."""
        try:
            await self._ask("GET", "/health", seconds=_HEALTH_SECONDS)
        except EngineError:
            self._mode_is_right = False
            return False
        if not self._mode_is_right:
            self._mode_is_right = await self._has_the_right_mode()
            self.facts = await self._read_facts()
        return self._mode_is_right

    async def cache_use(self) -> CacheUse:
        """The use of its prefix cache. Raises EngineError."""
        return prefix_cache.read((await self._ask("GET", "/metrics", seconds=_HEALTH_SECONDS)).decode())

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the PEFT folder `path` under `name`. Raises EngineError, also if the name is loaded."""
        body = {"lora_name": name, "lora_path": str(path.absolute())}
        await self._ask("POST", "/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for `name`; those in flight end. Raises EngineError(404) if it is not loaded.

        The worker drops the tensors when it needs their place.
        """
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        listed = (await self._json("GET", "/v1/models"))["data"]
        return [model["id"] for model in listed if model["id"] != BASE_NAME]

    async def verify_adapter(self, name: str, path: Path) -> AdapterReport:
        """Compare the tensors each worker multiplies with against the file in the folder `path`."""
        reports = await self._rpc("verify_adapter", name, str(path.absolute()))
        return AdapterReport(
            modules=min(report["modules"] for report in reports),
            expected=max(report["expected"] for report in reports),
            mismatched=tuple(line for report in reports for line in report["mismatched"]),
            sha256=reports[0]["sha256"],
        )

    async def score(self, model: str, token_ids: list[int]) -> list[float]:
        """log p(token | those before it) of each given token at temperature 1, over the whole vocabulary.

        As many as `token_ids`; the first, which has nothing before it, is 0. Reads no prefix cache, and does
        not stand in line behind the rollouts.
        """
        body = {
            "model": model,
            "prompt": token_ids,
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 1.0,
            "priority": SCORING_PRIORITY,
        }
        answer = await self._json("POST", "/v1/completions", body)
        rows = answer["choices"][0]["prompt_logprobs"]
        return [0.0] + [
            self._number(row[str(token)]["logprob"])
            for row, token in zip(rows[1:], token_ids[1:], strict=True)
        ]

    async def tokenize(
        self,
        text: str | list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of a text, or of messages in the model's own chat template. Raises EngineError.

        `tools`: those the messages were exchanged with.
        """
        body: dict[str, Any] = {"model": BASE_NAME, "add_special_tokens": add_special_tokens}
        if isinstance(text, str):
            body["prompt"] = text
        else:
            body |= {"messages": text, "add_generation_prompt": add_generation_prompt}
        if tools:
            body["tools"] = tools
        return (await self._json("POST", "/tokenize", body))["tokens"]

    async def tokenizer(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of one of vLLM's routes of the tokenizer; without a body by GET. Raises EngineError."""
        if body is None:
            return await self._json("GET", path)
        return await self._json("POST", path, body | {"model": BASE_NAME})

    async def render(self, body: dict[str, Any]) -> list[int]:
        """The ids of the prompt that the engine would make of a chat request. Raises EngineError."""
        rendered = await self._json("POST", "/v1/chat/completions/render", body | {"model": BASE_NAME})
        return rendered["token_ids"]

    async def score_next(self, model: str, token_ids: list[int], token: int) -> float:
        """log p(token | token_ids) at temperature 1, asked as a rollout asks: its prefix cache is read."""
        body = {
            "model": model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": 0,
            "logprob_token_ids": [token],
            "return_tokens_as_token_ids": True,
            "priority": SCORING_PRIORITY,
        }
        answer = await self._json("POST", "/v1/completions", body)
        return self._number(answer["choices"][0]["logprobs"]["top_logprobs"][0][f"token_id:{token}"])

    async def context_length(self) -> int:
        """The longest sequence it takes, prompt and answer together, in tokens."""
        length = self._context_length
        if length is None:
            listed = (await self._json("GET", "/v1/models"))["data"]
            length = int(next(model["max_model_len"] for model in listed if model["id"] == BASE_NAME))
            self._context_length = length
        return length

    async def _read_facts(self) -> EngineFacts:
        """An engine that does not report them is used all the same: fewer problems are noticed then."""
        try:
            bare, whole = [await self.tokenize("a", add_special_tokens=special) for special in (False, True)]
            begins = whole[0] if whole[-len(bare) :] == bare and len(whole) > len(bare) else None
            return EngineFacts(await self.context_length(), begins)
        except (EngineError, LookupError, ValueError) as error:
            log.warning("%s: its first token is unknown: %s", self.name, error)
            return UNKNOWN

    async def _has_the_right_mode(self) -> bool:
        try:
            modes = {worker["logprobs_mode"] for worker in await self._rpc("sampling")}
        except EngineError as error:
            log.error("%s: its logprobs mode is unknown: %s", self.name, error)
            return False
        if modes != {LOGPROBS_MODE}:
            log.error("%s: logprobs modes %s, not %r: it is not used", self.name, modes, LOGPROBS_MODE)
        return modes == {LOGPROBS_MODE}

    async def _rpc(self, method: str, *arguments: str) -> list[Any]:
        body = {"method": method, "args": list(arguments)}
        return (await self._json("POST", "/collective_rpc", body))["results"]

    async def _json(self, method: str, path: str, body: object = None) -> Any:
        return json.loads(await self._ask(method, path, body))

    async def _ask(self, method: str, path: str, body: object = None, seconds: float | None = None) -> bytes:
        content = None if body is None else json.dumps(body).encode()
        bound = seconds or self._control_seconds
        timeout = aiohttp.ClientTimeout(total=bound, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._open().request(
                method, f"http://engine{path}", data=content, headers=_JSON, timeout=timeout
            ) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise EngineUnreachableError(self.name, f"{path}: no answer within {bound:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachableError(self.name, f"{path}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise EngineError(self.name, response.status, f"{path}: {_message(answer)}", answer)
        return answer

    def _number(self, logprob: float | None) -> float:
        """JSON has null for a number that is not finite (http_speedups.py). Raises EngineError."""
        if logprob is None:
            raise EngineError(self.name, 200, "a logprob is not a number")
        return logprob

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(path=str(self.socket), limit=0, keepalive_timeout=_IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def _message(answer: bytes) -> str:
    """The message of an OpenAI error object, else the beginning of the text."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:300].decode(errors="replace")
