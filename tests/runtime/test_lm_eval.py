"""lm-evaluation-harness as it is installed scores the policy: its loglikelihoods are transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.runtime.adapters import logprobs
from tests.runtime.conftest import RunningEngine
from tests.runtime.gateway_process import TOKEN, Gateway
from tests.support.agent_world import said_by
from tests.support.foreign_environments import LM_EVAL
from tests.support.relay_process import RelayProcess

pytestmark = pytest.mark.long

PAIRS = [
    ("[[ ## english ## ]]\nthe black cat", "\n[[ ## french ## ]]\nle chat noir"),
    ("the red house", " la maison rouge"),
    ("the red house", " and the old man and the sea"),
    ("a", " b c d"),
]


def test_lm_evals_loglikelihoods_are_those_of_transformers(engine: RunningEngine, tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, engine.socket, engine.model).until_ready()
    relay = RelayProcess(gateway.socket, TOKEN, tmp_path / "relay.log")
    try:
        said = said_by(
            LM_EVAL, "lm_eval_scores.py", json.dumps(PAIRS), base_url=f"{relay.url}/v1", api_key=TOKEN
        )
    finally:
        relay.stop()
        gateway.stop()
    assert said["tokenizer"] == "remote"
    tokenizer = AutoTokenizer.from_pretrained(engine.model)
    for (context, continuation), (score, _) in zip(PAIRS, said["scores"], strict=True):
        begun = tokenizer.encode(context, add_special_tokens=False)
        whole = tokenizer.encode(context + continuation, add_special_tokens=False)
        assert whole[: len(begun)] == begun
        expected = float(logprobs(engine.model, None, whole)[len(begun) - 1 :].sum())
        assert score == pytest.approx(expected, abs=1e-3)
