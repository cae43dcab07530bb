"""An answer's exact ids by a chat template that knows tools: what is kept of it, and what is refused.

The engine's part is played by transformers' own rendering with the tiny model's tokenizer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.gateway.steps.rendering import NotRenderedError, render
from tests.runtime.conftest import TINY_MODEL

pytestmark = pytest.mark.quick

TEMPLATE = (
    "{% if tools %}tools {{ tools | map(attribute='function.name') | join(' ') }}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}call {{ call.function.name }} {% endfor %}END\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHOLE = TEMPLATE.replace("END", "<|im_end|>")
OTHER_END = TEMPLATE.replace("END", "{{ '!' if message.tool_calls else '<|im_end|>' }}")
QUESTION = [{"role": "user", "content": "the black cat"}]
TOOLS = [{"type": "function", "function": {"name": "paint"}}]
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "paint"}}],
}


class Template:
    """What of an engine's client renders. `asked`: how often."""

    def __init__(self, template: str, context: int = 1024) -> None:
        self.template = template
        self.context = context
        self.asked = 0
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)

    async def tokenize(
        self, text: Any, *, add_generation_prompt: bool = True, tools: Any = None
    ) -> list[int]:
        self.asked += 1
        if isinstance(text, list):
            text = self.tokenizer.apply_chat_template(
                text,
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def context_length(self) -> int:
        return self.context

    def render(self, answer: Any, tools: Any = None) -> tuple[str, str]:
        """As texts."""
        prompt, completion = asyncio.run(render(self, QUESTION, answer, tools))
        return self.tokenizer.decode(prompt), self.tokenizer.decode(completion)


def test_c53_an_answer_that_calls_tools_is_what_the_template_makes_of_it_with_its_end() -> None:
    prompt, completion = Template(WHOLE).render(CALLS, TOOLS)
    assert completion == "call paint <|im_end|>"
    assert prompt == "tools paint<|im_end|><|im_start|>user\nthe black cat<|im_end|>\n<|im_start|>assistant\n"
    said = CALLS | {"content": "le chat "}
    assert Template(WHOLE).render(said)[1] == "le chat call paint <|im_end|>"
    assert Template(WHOLE).render({"role": "assistant", "content": "oui"})[1] == "oui<|im_end|>"


@pytest.mark.parametrize(
    ("template", "answer", "why"),
    [
        (OTHER_END, CALLS, "does not end it as an answer"),
        (WHOLE, CALLS | {"tool_calls": [], "reasoning": "so"}, "stands inside it"),
        (
            WHOLE.replace("{{ message.content or '' }}", "{{ message.content | trim }}"),
            " oui",
            "template changes it",
        ),
        (
            WHOLE.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}x"),
            "oui",
            "template changes it",
        ),
        (TEMPLATE.replace("END\n", ""), "oui", "does not end an answer"),
    ],
)
def test_c53_what_a_template_shows_otherwise_has_no_exact_ids(template: str, answer: Any, why: str) -> None:
    with pytest.raises(NotRenderedError, match=why):
        Template(template).render(answer)


LONG = "le chat " * 300
CALLED_LONG = [{"function": {"name": "paint", "arguments": LONG}}]


@pytest.mark.parametrize(
    ("answer", "tools", "context", "asked"),
    [
        (LONG, None, 128, 0),
        (CALLS | {"tool_calls": CALLED_LONG}, None, 128, 0),
        (CALLS, [{"type": "function", "function": {"name": "paint", LONG: 1}}], 128, 0),
        # Of a question that fills the context by itself no more is asked.
        ("oui", None, 8, 1),
    ],
)
def test_r02_no_engine_is_given_what_no_context_holds(
    answer: Any, tools: Any, context: int, asked: int
) -> None:
    engine = Template(WHOLE, context)
    with pytest.raises(NotRenderedError, match="longer than the context"):
        engine.render(answer, tools)
    assert engine.asked == asked
