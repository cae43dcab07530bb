"""Judges through other packages: a LiteLLM name, or a client of OpenAI's SDK that the program has.

Both packages are the program's: LiteLLM is imported when a name is first used, before the time of any answer
is counted, and a client comes as an object. Neighbours: `judge_protocol.py` reads their answers. Knows
nothing of the judged texts.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from launcher.client.ruler.judge_failures import AnswerUnusable, JudgeUnusable, RetryableError
from launcher.client.ruler.judge_protocol import (
    JudgeReply,
    Messages,
    cache_identity,
    error_for_status,
    headers_for,
    is_own_run,
    names_fixed_weights,
    parse_completion,
)


@dataclass
class LiteLLMJudge:
    """A model by LiteLLM's name, such as openai/o3. `extra_params` go into each `acompletion`."""

    model: str
    extra_params: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._supports_schema = True
        self._litellm = _litellm(self.model)

    @property
    def name(self) -> str:
        return self.model

    @property
    def identity(self) -> str | None:
        place = self._base_url()
        if is_own_run(place) and not names_fixed_weights(self.model.rpartition("/")[2]):
            return None
        return cache_identity(place or "", self.model, self.extra_params)

    async def ask(self, messages: Messages, form: Mapping[str, Any], seconds: float) -> JudgeReply:
        """See Judge. Where the form itself is refused it is asked without, from then on."""
        arguments: dict[str, Any] = {
            "timeout": seconds,
            "num_retries": 0,
            "max_retries": 0,
            "caching": False,
            **self.extra_params,
        }
        if tags := headers_for(self._base_url()):
            arguments["extra_headers"] = {**(arguments.get("extra_headers") or {}), **tags}
        if self._supports_schema:
            arguments.setdefault("response_format", form)
        try:
            response = await self._litellm.acompletion(model=self.model, messages=list(messages), **arguments)
        except Exception as error:  # noqa: BLE001 - an SDK may raise any type
            if self._supports_schema and "response_format" in str(error):
                self._supports_schema = False
                return await self.ask(messages, form, seconds)
            if "LLM Provider NOT provided" in str(error):  # it reports this by 400, as for a bad question
                raise JudgeUnusable(
                    f"The judge {self.model} cannot be asked: LiteLLM does not know whose model that is",
                    None,
                    "name whose it is too, as in openai/o3: docs.litellm.ai/docs/providers has the names",
                ) from None
            raise _judge_error(self.name, error, self.extra_params.get("api_key")) from None
        hidden = getattr(response, "_hidden_params", None) or {}
        cost = hidden.get("response_cost")
        return parse_completion(response, float(cost) if isinstance(cost, int | float) else None)

    def _base_url(self) -> str | None:
        base_url = self.extra_params.get("api_base") or self.extra_params.get("base_url")
        if base_url is None and self.model.startswith("openai/"):
            base_url = os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL")
        return base_url


def _litellm(model: str) -> Any:
    # Else it asks the network for a list of prices as it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        return import_module("litellm")
    except ImportError as error:
        raise JudgeUnusable(
            f"The judge {model} is asked through LiteLLM, which is not installed here",
            f"{type(error).__name__}: {error}",
            "pip install litellm",
        ) from None


@dataclass
class ClientJudge:
    """A model by a client of OpenAI's SDK, sync or async, or by an object with the same methods."""

    client: Any = field(repr=False)
    model: str
    extra_params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._supports_schema = True

    @property
    def name(self) -> str:
        return self.model

    @property
    def identity(self) -> str | None:
        place = self._base_url()
        if not place or (
            is_own_run(place) and not names_fixed_weights(self.model)
        ):  # two without one may be two
            return None
        return cache_identity(place, self.model, self.extra_params)

    async def ask(self, messages: Messages, form: Mapping[str, Any], seconds: float) -> JudgeReply:
        """See Judge. Where the form itself is refused it is asked without, from then on."""
        create = self.client.chat.completions.create
        arguments: dict[str, Any] = {"timeout": seconds, **self.extra_params}
        if self._supports_schema:
            arguments.setdefault("response_format", form)
        if tags := headers_for(self._base_url()):
            arguments["extra_headers"] = {**(arguments.get("extra_headers") or {}), **tags}
        arguments |= {"model": self.model, "messages": list(messages)}
        try:
            if inspect.iscoroutinefunction(create):
                response = await create(**arguments)
            else:
                response = await asyncio.to_thread(create, **arguments)
                response = await response if inspect.isawaitable(response) else response
        except Exception as error:  # noqa: BLE001 - as above
            if self._supports_schema and "response_format" in str(error):
                self._supports_schema = False
                return await self.ask(messages, form, seconds)
            raise _judge_error(self.name, error, getattr(self.client, "api_key", None)) from None
        return parse_completion(response, None)

    def _base_url(self) -> str:
        return str(getattr(self.client, "base_url", None) or "")


def _judge_error(name: str, error: Exception, key: Any) -> Exception:
    """An SDK's error by its HTTP status; one without a status is the connection's, or the SDK's own."""
    if isinstance(error, AnswerUnusable):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(key, str) and key:  # servers repeat a key that they do not know
        text = text.replace(key, "…")
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return error_for_status(name, status, text)
    return RetryableError(text[:200])
