"""The GPU memory of an engine; the rest of its share is the cache of keys and values.

Neighbours: `planning.py` asks for whole tables; `runtime/engine/command.py` passes the plan to vLLM. An
engine is on one GPU and has the whole model. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.shared.memory import assumptions
from runtime.shared.memory.memory_item import MemoryLine, format_count
from runtime.shared.model_shape import ModelShape
from runtime.shared.peft_format import engine_rank

# Sequences of a publication's probes, for which an engine has places of their own.
PROBE_PLACES = 4


@dataclass(frozen=True)
class EngineSetup:
    """The serving setup: `max_loras` adapters and `max_num_seqs` sequences at a time, `max_batched_tokens`
    tokens in one pass."""

    rank: int
    names: tuple[str, ...]
    max_loras: int
    max_num_seqs: int
    max_batched_tokens: int
    number_bytes: int = 2


def defaults(gpu: str, gpu_bytes: int) -> tuple[int, int]:
    """vLLM's own places and tokens of one pass on such a GPU."""
    gib = 0 if gpu.upper().startswith("A100") else gpu_bytes / assumptions.GIB
    for least, places, batch in assumptions.ENGINE_DEFAULTS:
        if gib >= least:
            return places, batch
    raise AssertionError("the last row of the table is for every GPU")


def items(shape: ModelShape, serving: EngineSetup) -> list[MemoryLine]:
    """Each byte of one engine but the cache, with its reason."""
    return [_weights(shape, serving), _slots(shape, serving), _passes(shape, serving), *_overheads()]


def _weights(shape: ModelShape, serving: EngineSetup) -> MemoryLine:
    plain = shape.weights * serving.number_bytes
    if shape.stored_bits is None:
        return MemoryLine("weights", plain, f"{format_count(shape.weights)} parameters, whole on each GPU")
    stored = round(shape.expert_weights * (shape.stored_bits / 8 - serving.number_bytes))
    return MemoryLine(
        "weights", plain + stored, f"the experts as they are stored, {shape.stored_bits} bits each"
    )


def _slots(shape: ModelShape, serving: EngineSetup) -> MemoryLine:
    rank = engine_rank(serving.rank)
    one = shape.adapter_weights(rank, serving.names) * serving.number_bytes
    return MemoryLine(
        "LoRA slots", serving.max_loras * one, f"{serving.max_loras} adapters of rank {rank}, to swap between"
    )


def _passes(shape: ModelShape, serving: EngineSetup) -> MemoryLine:
    """The widest moment of a pass over a batch of tokens, and of sampling."""
    experts = shape.experts
    wide = shape.intermediate if experts is None else experts.per_token * (experts.width + shape.hidden)
    activations = serving.max_batched_tokens * (3 * wide + 4 * shape.hidden) * serving.number_bytes
    sampling = serving.max_num_seqs * shape.vocabulary * assumptions.SAMPLING_BYTES_PER_WORD
    size = max(activations, sampling)
    tokens, places = serving.max_batched_tokens, serving.max_num_seqs
    why = f"a pass over {tokens:,} tokens, or sampling for {places:,} places: the larger"
    return MemoryLine("a pass", size, why)


def _overheads() -> list[MemoryLine]:
    return [
        MemoryLine("CUDA", assumptions.CONTEXT_BYTES, "context and libraries (assumed)"),
        MemoryLine(
            "graphs", assumptions.GRAPHS_BYTES, "captured CUDA graphs, beside vLLM's fraction (assumed)"
        ),
    ]


def cache_bytes(shape: ModelShape, tokens: int, number_bytes: int) -> int:
    """Keys and values of one sequence of so many tokens; a layer with a window keeps no more than that. Where
    some layers pass a state, it is whole blocks."""
    each = 2 * shape.key_value * number_bytes
    if shape.linear_attention is None:
        return sum(each * min(tokens, window or tokens) for window in shape.windows)
    blocks = math.ceil(tokens / (_page_bytes(shape, number_bytes) // each))
    groups = math.ceil(len(shape.linear_attention.layers) / len(shape.windows))
    return (blocks + assumptions.STATES_PER_SEQUENCE * groups) * _block_bytes(shape, number_bytes)


def max_sequences(shape: ModelShape, cache: int, number_bytes: int) -> int | None:
    """How many sequences an engine with so many bytes of cache takes at a time; None: any number.

    Where layers pass a state, vLLM 0.32 does not start with more places than its cache has blocks.
    """
    return None if shape.linear_attention is None else cache // _block_bytes(shape, number_bytes)


def _page_bytes(shape: ModelShape, number_bytes: int) -> int:
    """One layer's part of a block: a state, and as many tokens' keys and values as fill its room."""
    assert shape.linear_attention is not None
    each = 2 * shape.key_value * number_bytes
    step = assumptions.PAGE_TOKENS * each
    return math.ceil(shape.linear_attention.state_bytes(number_bytes) / step) * step


def _block_bytes(shape: ModelShape, number_bytes: int) -> int:
    """A block has a page of each layer with attention; layers with states are taken in groups of as many."""
    return len(shape.windows) * _page_bytes(shape, number_bytes)
