"""The tiny model's own rendering of DSPy's chat format is DSPy's, letter for letter."""

from __future__ import annotations

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from runtime.tiny import chat

DIRECTIONS = [("english", "french"), ("french", "english")]
TEXTS = ["the black cat", "la sœur derrière le zèbre", "", "two\nlines", "[[ ## french ## ]]"]
ANSWERS = [
    "[[ ## french ## ]]\nle chat noir\n\n[[ ## completed ## ]]\n",
    "[[ ## french ## ]] le chat noir",
    "[[ ## french ## ]]\nle chat\n noir\n",
    "Here: [[ ## french ## ]]\nle chat",
    "  [[ ## french ## ]]\nle chat\n[[ ## french ## ]]\nle chien",
    "[[ ## english ## ]]\nthe cat\n[[ ## french ## ]]\nle chat\n[[ ## english ## ]]\nthe cat",
    "[[ ## french ## ]]",
    "[[ ## completed ## ]]",
    "le chat noir",
    "",
]


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@pytest.mark.parametrize("text", TEXTS)
def test_messages_are_those_of_dspys_chat_adapter(source: str, target: str, text: str) -> None:
    signature = dspy.Signature(f"{source} -> {target}")
    assert chat.messages(source, target, text) == dspy.ChatAdapter().format(signature, [], {source: text})


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@pytest.mark.parametrize("text", TEXTS[:2])
def test_a_completion_is_what_dspy_fine_tunes_on(source: str, target: str, text: str) -> None:
    signature = dspy.Signature(f"{source} -> {target}")
    example = dspy.ChatAdapter().format_finetune_data(signature, [], {source: "in"}, {target: text})
    assert {"role": "assistant", "content": chat.completion(target, text)} == example["messages"][-1]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_read_as_dspy_reads_it(answer: str) -> None:
    signature = dspy.Signature("english -> french")
    try:
        expected = dspy.ChatAdapter().parse(signature, answer)["french"]
    except AdapterParseError:
        expected = None
    assert chat.parse("french", answer) == expected
