"""Which parsers an engine is given for a model's tool calls and thoughts (runtime/engine/parsers.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.command import model_parsers
from runtime.engine.parsers import REASONING, TOOL_CALLS, Parsers, select_parsers
from tests.runtime.conftest import TINY_MODEL

CHATML = "<|im_start|>user\n"
QWEN25 = CHATML + "within <tools></tools> XML tags ... within <tool_call></tool_call> XML tags"
QWEN3 = QWEN25 + "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
LLAMA = "<|start_header_id|>assistant<|end_header_id|> {% for tool_call in message.tool_calls %}"
GRANITE = "<|start_of_role|>assistant<|end_of_role|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
THOUGHT = {"<think>", "</think>"}
WORDS = {"Ġ</", "</", "think", ">"}
CALLS = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"}

# What the templates of known models hold, the tokens theirs have of what is asked for, and the parsers.
MODELS: dict[str, tuple[str, set[str], Parsers]] = {
    "Qwen2.5": (QWEN25, {"<tool_call>"}, Parsers("hermes", None)),
    "Qwen3": (QWEN3, THOUGHT, Parsers("hermes", "qwen3")),
    "Qwen3-Thinking-2507": (QWEN25 + "<think>\n{{ '</think>' }}", THOUGHT, Parsers("hermes", "deepseek_r1")),
    "Qwen3-Instruct-2507": (QWEN25, THOUGHT, Parsers("hermes", None)),
    "a template that only takes thoughts out of history": (
        QWEN25 + "content.split('</think>')[-1]",
        THOUGHT,
        Parsers("hermes", None),
    ),
    "Qwen3-Coder": (QWEN25 + "<function=x><parameter=y>", THOUGHT, Parsers("qwen3_coder", None)),
    "SmolLM3": (QWEN3, THOUGHT | {"<|python_tag|>"}, Parsers("hermes", "qwen3")),
    "thoughts that are no tokens": (QWEN3, set(), Parsers("hermes", None)),
    "Llama-3.2": (LLAMA, {"<|python_tag|>"}, Parsers("llama3_json", None)),
    "Llama-3": (LLAMA, set(), Parsers(None, None)),
    "R1-Distill-Llama": (
        "<｜Assistant｜><think>\n</think>",
        THOUGHT | {"<|python_tag|>"},
        Parsers(None, "deepseek_r1"),
    ),
    "DeepSeek-V3": (DEEPSEEK + "```json", CALLS, Parsers("deepseek_v3", None)),
    "Mistral-v0.3": ("[AVAILABLE_TOOLS] [TOOL_CALLS]", {"[TOOL_CALLS]"}, Parsers("mistral", None)),
    "Mistral-v0.1": ("[INST] [/INST]", set(), Parsers(None, None)),
    "Phi-4-mini": ("<|system|><|tool|>{{ tools }}<|/tool|><|end|>", set(), Parsers("phi4_mini_json", None)),
    "Phi-3": ("<|user|>\n<|end|>\n<|assistant|>", set(), Parsers(None, None)),
    "Gemma-3": ("<start_of_turn>model\n", set(), Parsers(None, None)),
    "Granite-3.1": (GRANITE + "<|tool_call|>", {"<|tool_call|>"}, Parsers("granite", None)),
    "Granite-3.2": (
        GRANITE + "<|tool_call|>Here is my thought process:",
        set(),
        Parsers("granite", "granite"),
    ),
    "Granite-4": (GRANITE + "<tool_call></tool_call>", set(), Parsers("granite4", None)),
    "OLMo-2": ("<|endoftext|><|user|>\n<|assistant|>\n", set(), Parsers(None, None)),
    "OLMo-3": (CHATML + "<function_calls></function_calls>", set(), Parsers("olmo3", None)),
    "OLMo-3-Think": (CHATML + "<function_calls></function_calls><think>", WORDS, Parsers("olmo3", "olmo3")),
    "gpt-oss": (
        "<|start|>assistant<|channel|>analysis<|message|><|call|>",
        set(),
        Parsers("openai", "openai_gptoss"),
    ),
    "GLM-4.5": ("<tool_call><arg_key><think></think>", THOUGHT, Parsers("glm45", "glm45")),
    "LFM2": (
        "<|tool_call_start|><|im_start|>",
        {"<|tool_call_start|>", "<|tool_call_end|>"},
        Parsers("lfm2", None),
    ),
    "ChatML without a word of tools": (CHATML, set(), Parsers("hermes", None)),
    "no template": ("", set(), Parsers(None, None)),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_template_and_its_tokens_choose_the_parsers(model: str) -> None:
    template, tokens, parsers = MODELS[model]
    assert select_parsers(template, tokens.__contains__) == parsers


@pytest.mark.parametrize(
    "named",
    [
        {"chat_template": QWEN3},
        {"chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": QWEN3}]},
    ],
    ids=["one", "several"],
)
def test_the_template_is_found_where_transformers_finds_it(tmp_path: Path, named: dict[str, Any]) -> None:
    assert model_parsers(str(tmp_path)) == Parsers(None, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokens = [{"id": 5, "content": "<think>"}, {"id": 6, "content": "</think>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert model_parsers(str(tmp_path)) == Parsers("hermes", "qwen3")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert model_parsers(str(tmp_path)) == Parsers("hermes", None)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*TOOL_CALLS, *REASONING], ids=lambda rule: f"{rule.parser} {rule.marks[0]}")
def test_vllm_has_every_parser_and_takes_it_with_the_tokens_that_were_asked_for(rule: Any) -> None:
    from transformers import AutoTokenizer
    from vllm.parser import ParserManager

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_tokens(list(rule.tokens))
    names = (
        {"tool_parser_name": rule.parser} if rule in TOOL_CALLS else {"reasoning_parser_name": rule.parser}
    )
    assert ParserManager.get_parser(**names, enable_auto_tools=True, tokenizer=tokenizer) is not None
