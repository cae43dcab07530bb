"""Where a prompt in ids begins its last turn (last_turn_parsing.py): no earlier thought ends the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runtime.engine import last_turn_parsing
from tests.runtime.test_thoughts import thinker as _thinker

thinker = _thinker
END = "</think>"


@pytest.mark.slow
@pytest.mark.parametrize(("sees", "is_over"), [({}, True), ({last_turn_parsing.LAST_TURN: 3}, False)])
def test_joined_turns_thoughts_do_not_end_the_next_one(
    thinker: Any, sees: dict[str, int], is_over: bool
) -> None:
    """By vLLM's own parser of DeepSeek's thoughts, which looks for their end in the whole prompt."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.parser import ParserManager

    make = OpenAIServingChat._make_parser
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    kind = ParserManager.get_parser(
        tool_parser_name=None,
        reasoning_parser_name="deepseek_r1",
        enable_auto_tools=False,
        tokenizer=tokenizer,
    )
    prompt = [5, tokenizer.convert_tokens_to_ids(END), 6, 7, 8]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], model="base", **sees)
    try:
        last_turn_parsing.install()
        serving: Any = SimpleNamespace(parser_cls=kind, model_config=None)
        parser = OpenAIServingChat._make_parser(serving, request, tokenizer, {})
        assert parser.is_reasoning_end(prompt) is is_over
        delta = parser.parse_delta("le chat", [9], request, prompt, finished=False)
        assert delta is not None
        assert (delta.content, delta.reasoning) == (("le chat", None) if is_over else (None, "le chat"))
    finally:
        OpenAIServingChat._make_parser = make
