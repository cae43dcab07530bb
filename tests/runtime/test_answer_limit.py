"""An answer has a limit although its request names none, and what is judged by a limit knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.engines.engine_client import EngineFacts
from runtime.gateway.gateway import build_components
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.requests.answer_limit import limit_answer
from runtime.shared.runtime_config import EngineConfig, RuntimeConfig
from tests.runtime.recorded import asked


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({}, 100),
        ({"max_tokens": None, "max_completion_tokens": None}, 100),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 700}, 700),
        ({"min_tokens": 200}, 200),
        ({"min_tokens": "x"}, 100),
        ({"max_completion_tokens": 7}, None),
    ],
)
def test_a_chat_that_names_no_limit_gets_one(body: dict[str, Any], limit: int | None) -> None:
    limit_answer("chat", body, 100, None)
    assert body.get("max_tokens") == limit


def test_a_completion_keeps_openais_own() -> None:
    body: dict[str, Any] = {"prompt": "a"}
    limit_answer("completion", body, 100, 1000)
    assert body == {"prompt": "a"}


@pytest.mark.parametrize(
    ("given", "context", "limit"),
    [(None, None, 100), (None, 1000, 100), (None, 60, 20), (50, 60, 20), (7, 60, 7), ("x", 60, "x")],
)
def test_ids_leave_the_rest_of_the_context(given: Any, context: int | None, limit: Any) -> None:
    body: dict[str, Any] = {"prompt": [5] * 40, "max_tokens": given}
    limit_answer("tokens", body, 100, context)
    assert body["max_tokens"] == limit


@pytest.mark.parametrize("prompt", [[5] * 60, [[5], [5] * 60]])
def test_ids_past_the_context_are_refused_before_anybody_reads_them(prompt: list[Any]) -> None:
    with pytest.raises(ApiError, match=r"maximum context length is 60 tokens\. Your prompt has 60"):
        limit_answer("completion", {"prompt": prompt}, 100, 60)
    limit_answer("completion", {"prompt": prompt, "truncate_prompt_tokens": 5}, 100, 60)


def test_c05_the_engine_and_the_record_have_the_limit(tmp_path: Path) -> None:
    config = RuntimeConfig(
        run_id="t", model_path="m", state_dir=str(tmp_path), socket_dir=str(tmp_path),
        engine=EngineConfig(answer_tokens=123),
    )  # fmt: skip
    request = asked(rollout="r")
    sent = request.for_engine("policy@v1", build_components(config).completions._check)
    assert sent["max_tokens"] == request.settings["max_tokens"] == 123


@pytest.mark.parametrize(("configured", "said", "limit"), [(96, None, 96), (None, 1024, 1024), (96, 64, 64)])
def test_the_limit_is_one_that_the_engines_take(
    tmp_path: Path, configured: int | None, said: int | None, limit: int
) -> None:
    """Of one past their context vLLM says that it cannot be: nobody could ask without a limit."""
    config = RuntimeConfig(
        run_id="t", model_path="m", state_dir=str(tmp_path), socket_dir=str(tmp_path),
        engine=EngineConfig(max_model_len=configured),
    )  # fmt: skip
    parts = build_components(config)
    parts.clients[0].facts = EngineFacts(context_length=said)
    sent = asked(rollout="r").for_engine("policy@v1", parts.completions._check)
    assert sent["max_tokens"] == limit
