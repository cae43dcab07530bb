"""A conversation that is sent again goes on from its earlier turns, whatever the template makes of it.

On a real engine under a template that rewrites what came earlier: it keeps the end of an earlier answer, as
others do with thoughts, and writes the calls of tools anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.shared.batch import Batch, read_batch
from runtime.trainer.forward import pack_logprobs, sequences
from runtime.trainer.packing import pack
from tests.runtime.conftest import TINY_MODEL, EngineProcess, start_engine
from tests.runtime.gateway_process import MESSAGES, Gateway
from tests.runtime.test_from_text import rows, step
from tests.runtime.trainer_fixtures import fresh_policy

Message = dict[str, Any]

REWRITING = """{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{% set text = m.content or '' %}
{%- if m.role == 'assistant' and not loop.last %}{% set text = text.split(' ## ]]\\n')[-1] %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + text }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MORE = [
    {"role": "user", "content": f"[[ ## english ## ]]\nthe {animal}"}
    for animal in ("dog", "red cat", "old man")
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of the tiny model, whose template rewrites history."""
    folder = tmp_path_factory.mktemp("rewriting")
    model = folder / "model"
    shutil.copytree(TINY_MODEL, model)
    (model / "chat_template.jinja").write_text(REWRITING)
    started = start_engine(folder, model_path=str(model))
    started.wait_until_ready()
    yield started
    started.end()


@pytest.fixture(scope="module")
def gateway(rewriting: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("joined"), rewriting.socket, TINY_MODEL).until_ready()
    yield running
    running.stop()


def said(answer: Any) -> Message:
    """The assistant's message of an answer, whole or streamed, as a client sends it again."""
    assert answer.status_code == 200, answer.text
    if not answer.text.startswith("data:"):
        return answer.json()["choices"][0]["message"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [one["delta"] for event in events for one in event["choices"]]
    return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}


def talk(gateway: Gateway, rollout: str | None, turns: int = 3, **fields: Any) -> list[Message]:
    """A conversation of so many turns, sent again each time; every other answer is streamed."""
    messages = list(MESSAGES)
    for number in range(turns):
        given = gateway.chat(
            rollout, messages=messages, max_tokens=40, temperature=1.0, stream=number % 2 == 1, **fields
        )
        messages += [said(given), MORE[number]]
    return messages


def exchanges(gateway: Gateway, rollout: str | None) -> list[dict[str, Any]]:
    return [line for line in gateway.recorded() if line["tags"]["rollout"] == rollout]


@torch.no_grad()
def trainers(batch: Batch, model: Path) -> torch.Tensor:
    """The trainer's own logprobs of a batch's tokens, joined as they are in it."""
    policy, found = fresh_policy(model=model), torch.zeros(len(batch.tokens))
    for one in pack(sequences(batch), range(batch.sequences), 4096):
        found[one.source_T] = pack_logprobs(policy, one, batch).logprob_T
    return found


@pytest.mark.slow
def test_joined_under_a_template_that_rewrites_history_and_trained_as_sampled(gateway: Gateway) -> None:
    for rollout in ("a", "b"):
        talk(gateway, rollout)
    counts = step(gateway, "joined", [{"rollout": "a", "reward": 0.0}, {"rollout": "b", "reward": 1.0}])
    assert (counts["trained"], counts["turns_joined"], counts["sealed"]) == (6, 4, 0)
    for rollout, (ids, sampled) in zip("ab", rows(gateway, 1), strict=True):
        lines = exchanges(gateway, rollout)
        last = lines[-1]
        assert ids == last["prompts"][0] + last["samples"][0]["completion_ids"]
        flagged = [token for token, flag in zip(ids, sampled, strict=True) if flag]
        assert flagged == [token for line in lines for token in line["samples"][0]["completion_ids"]]
        assert [bool(line["conversation"]["shown"]) for line in lines] == [False, True, True]
    batch = read_batch(gateway.folder / "steps" / "000001")
    mine = trainers(batch, TINY_MODEL)[batch.sampled == 1]
    assert mine.numpy() == pytest.approx(batch.logprobs[batch.sampled == 1], abs=2e-3)
