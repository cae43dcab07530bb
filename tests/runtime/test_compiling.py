"""Layers and logprobs as torch compiles them for a GPU: the same bits without fusion, few graphs, no break.

FlexAttention has no backward pass on a CPU: the mask of whole rows stands in for it there.
Fusion and the kernels are `tests/gpu`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from runtime.trainer import losses
from runtime.trainer.attention import BlockSparseMask
from runtime.trainer.compiling import Compiled
from runtime.trainer.forward import sequences
from runtime.trainer.network import compile_layers, enable_gradient_checkpointing
from runtime.trainer.packing import pack
from runtime.trainer.policy import Policy
from tests.runtime.families import FAMILIES, family_folder
from tests.runtime.trainer_fixtures import (
    SETTINGS,
    Measured,
    fresh_policy,
    make_batch,
    measure,
    random_samples,
    trained_policy,
)

WITH_EXPERTS = {"qwen3-moe", "gpt-oss"}
PLAIN = [name for name in FAMILIES if name not in WITH_EXPERTS]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """What was compiled before counts for limits."""
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def no_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer's chunks as on a GPU, in whole chunks, with nothing fused."""
    compiled = Compiled(losses._logprob_chunk, "aot_eager")
    monkeypatch.setattr(losses, "_chunk_function", lambda device: compiled)


def a_step(policy: Policy) -> Measured:
    return measure(
        policy, make_batch(random_samples(7, groups=2, members=2, prompt=40, completion=20)), SETTINGS
    )


def compiled_of(policy: Policy) -> list[Compiled]:
    found = [layer.forward for layer in policy.model.base_model.layers]
    return [getattr(forward, "args", [forward])[0] for forward in found]


@torch.no_grad()
def hidden_of_blocks(policy: Policy) -> tuple[Tensor, Tensor]:
    """Hidden states of real places by FlexAttention, and by the mask."""
    batch = make_batch(random_samples(8, groups=2, members=2, prompt=40, completion=20))
    (one,) = pack(sequences(batch), range(batch.sequences), 256)
    blocks = BlockSparseMask(one.tree_BL, one.branch_BL, one.positions_BL)
    real = one.tree_BL >= 0
    found = policy.hidden(one.tokens_BL, one.positions_BL, blocks)
    return found[real], policy.hidden(one.tokens_BL, one.positions_BL, one.mask_BLL())[real]


@pytest.mark.parametrize(
    "name", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.long) for name in PLAIN]
)
@pytest.mark.usefixtures("no_fusion")
def test_compiled_layers_compute_what_is_written_bit_for_bit(name: str) -> None:
    expected = a_step(trained_policy(model=family_folder(name)))
    policy = trained_policy(model=family_folder(name))
    compile_layers(policy.model, "aot_eager")
    found = a_step(policy)
    assert all(torch.equal(found.gradient[one], value) for one, value in expected.gradient.items())
    assert found.metrics["loss"] == expected.metrics["loss"]
    blocks, mask = hidden_of_blocks(policy)
    torch.testing.assert_close(blocks, mask, atol=1e-5, rtol=1e-4)
    assert not any(layer.plain for layer in compiled_of(policy))
    assert counters["stats"]["unique_graphs"] <= 7 and not counters["graph_break"]
    many = counters["stats"]["unique_graphs"]
    a_step(policy)
    assert counters["stats"]["unique_graphs"] == many, "the same step is compiled once"


@pytest.mark.usefixtures("no_fusion")
def test_compiled_layers_that_are_computed_twice_give_the_same_gradient() -> None:
    expected = a_step(trained_policy())
    policy = trained_policy()
    compile_layers(policy.model, "aot_eager")
    enable_gradient_checkpointing(policy.model)
    found = a_step(policy)
    assert all(torch.equal(found.gradient[one], value) for one, value in expected.gradient.items())
    assert not any(layer.plain for layer in compiled_of(policy)) and not counters["graph_break"]


def test_a_model_with_experts_stays_as_it_is_written() -> None:
    policy = fresh_policy(model=family_folder("qwen3-moe"))
    compile_layers(policy.model, "aot_eager")
    assert not any(isinstance(layer.forward, Compiled) for layer in policy.model.base_model.layers)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_torch_cannot_compile_is_computed_as_written_and_said_once(
    recompute: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no kernel for this card")

    monkeypatch.setattr(Compiled, "_logged", set())
    expected = a_step(trained_policy())
    policy = trained_policy()
    compile_layers(policy.model, refuses)
    if recompute:
        enable_gradient_checkpointing(policy.model)
    with caplog.at_level(logging.WARNING):
        found = a_step(policy)
    assert all(torch.equal(found.gradient[one], value) for one, value in expected.gradient.items())
    assert all(layer.plain for layer in compiled_of(policy))
    (said,) = [record.message for record in caplog.records if record.name == "runtime.trainer.compiling"]
    assert "no kernel for this card" in said and "slower" in said


@pytest.mark.parametrize("tokens", [5, 1024, 1500])
def test_padded_chunks_change_no_logprob_and_no_gradient(
    tokens: int, no_fusion: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    head = torch.nn.Linear(8, 50, bias=False)
    target = torch.randint(0, 50, (tokens,), generator=generator)
    temperature = torch.rand(tokens, generator=generator) + 0.5
    found = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(losses, "_chunk_function", lambda device: losses._logprob_chunk)
        hidden = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        logprobs = losses.token_logprobs(hidden, head, target, temperature)
        (logprobs.logprob_T * torch.linspace(-1, 1, tokens)).sum().backward()
        found.append((logprobs.logprob_T.detach(), logprobs.entropy_T, hidden.grad))
    for compiled, written in zip(*found, strict=True):
        assert compiled.shape == written.shape
        torch.testing.assert_close(compiled, written, atol=1e-6, rtol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
