"""Programs with Arbor's LM, as Arbor's README makes them, for tests against a small run."""

from __future__ import annotations

from typing import Any

import dspy

from launcher.client import arbor
from launcher.client.arbor.arbor_provider import ArborProvider
from tests.support.small_run import SmallRun

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


def examples(count: int) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french=f"mot {i}").with_inputs("english") for i in range(count)]


def length(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    return len(prediction.french) / 100


def lm(run: SmallRun, name: str = "", **settings: Any) -> dspy.LM:
    """By default of the run's own model."""
    model = f"openai/arbor:{name or run.hub_name}"
    return dspy.LM(model, provider=ArborProvider(), api_base=arbor.init()["base_url"], **settings)
