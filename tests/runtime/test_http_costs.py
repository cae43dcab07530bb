"""What vLLM's HTTP server is spared (runtime/engine/http_speedups.py): what it answers stays the same."""

from __future__ import annotations

import json
import random
import struct
from enum import StrEnum
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports vLLM


class Word(StrEnum):
    STOP = "stop"


def rendered(content: Any) -> bytes:
    from starlette.responses import JSONResponse

    from runtime.engine import http_speedups

    return http_speedups._rendered(JSONResponse({}), content)


def test_c02_an_answers_numbers_are_the_same_to_the_last_bit() -> None:
    generator = random.Random(0)
    bits = (struct.unpack("d", generator.randbytes(8))[0] for _ in range(20_000))
    numbers = [number for number in bits if number == number and abs(number) != float("inf")]
    numbers += [-generator.random() * 10**-exponent for exponent in range(12) for _ in range(200)]
    assert json.loads(rendered(numbers)) == numbers


def test_an_answer_is_the_same_json() -> None:
    answer = {
        "choices": [{"message": {"content": 'à "ligne"\n\x00\u2028😀'}, "finish_reason": Word.STOP}],
        "prompt_logprobs": [None, {17: {"logprob": -0.5, "rank": 1}}],
        "token_ids": [0, 1, 2**40],
        "created": 1.0,
        "stream": False,
    }
    assert json.loads(rendered(answer)) == json.loads(json.dumps(answer))


def test_c10_a_logprob_that_is_no_number_is_none() -> None:
    assert json.loads(rendered({"logprobs": [float("nan"), float("-inf"), -1.0]})) == {
        "logprobs": [None, None, -1.0]
    }
