"""Plans a run's GPU memory: chooses settings of the trainer and of vLLM that fit, with a line for each use.

Neighbours: the launcher asks before anything is rented and hands the chosen settings to the runtime;
`trainer.py` and `engine.py` have the arithmetic, `fitness.py` looks for `MemoryPlan.gpu_bytes` on the
machine. Pure: no torch.

The order of choice, because every sequence that an engine can sample must be trainable:

1. the longest `max_model_len`, up to 32,768 tokens;
2. no activation checkpointing, unless trainer and engine share the GPU: there the KV cache needs the memory;
3. packed rows long enough to keep a GPU busy;
4. vLLM's own default of `max_num_seqs`.

A KV cache of fewer than 32,768 tokens is taken only if no later choice has a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from runtime.shared import fixed_row_lengths, gpu_memory
from runtime.shared.memory import assumptions, engine, trainer
from runtime.shared.memory.memory_item import MemoryLine, total
from runtime.shared.model_shape import ModelShape

CONTEXT_LENGTHS = (32768, 16384, 8192, 4096, 2048)
# Tokens of a packed row. A step's rows are dealt out to the GPUs that train: more GPUs, shorter rows.
_ROW_TOKENS, _MIN_ROW_TOKENS = 16384, 4096
# `max_num_seqs` where vLLM's default does not fit.
_FEWER_SEQUENCES = (256, 64)
# The same where sequences have states, and each needs its block.
_FEWER_WITH_STATES = (512, 256, 128, 64, 32, 16)
# A KV cache of this size is large enough: sixteen answers of 2,048 tokens at a time.
_COMFORTABLE_TOKENS = 32768
_CENT = 100


@dataclass(frozen=True)
class Overrides:
    """The settings that the user set and the plan keeps; None where the plan chooses.

    The LoRA: `rank`, `target_modules` (None: `ModelShape.lora_names`), `scaled` (alpha is not the rank).
    `max_loras`: adapters that the engine keeps at a time. `number_bytes`: the bytes of a weight, 2 (bf16) or
    4 (fp32). `reference`: the loss has a KL term, and so a reference pass. `checkpointing`: activation
    checkpointing. `memory_fraction`: vLLM's `gpu_memory_utilization`.
    """

    rank: int = 16
    target_modules: tuple[str, ...] | None = None
    scaled: bool = False
    max_loras: int = 4
    number_bytes: int = 2
    reference: bool = False
    checkpointing: bool | None = None
    pack_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    memory_fraction: float | None = None
    kv_cache_gib: float | None = None


@dataclass(frozen=True)
class MachineGpus:
    """`count` GPUs of the kind `gpu`: `train` of them train, `infer` of them serve. A single GPU does both.

    `listed_bytes`: the memory of each as its driver lists it; None: the kind's usual memory is taken.
    """

    gpu: str
    count: int
    train: int
    infer: int
    listed_bytes: int | None = None

    @property
    def shared(self) -> bool:
        return self.train + self.infer > self.count


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one GPU that trains and of one that serves (or of the one that does both), line by line,
    and the chosen settings.

    `engine_places` (vLLM's `max_num_seqs`), `memory_fraction` (its `gpu_memory_utilization`) and
    `kv_cache_gib` are None where vLLM's own default stays. On a shared GPU the KV cache's size is always set,
    because vLLM's own measurement would count the trainer's memory as well. `cache_tokens`: the tokens that
    the KV cache holds. `gpu_bytes`: the least free memory that a GPU must have, with a cache for one sequence
    of `max_model_len`. `short`: the reason why it does not fit, None if it does; then `in_the_way` has
    the user's settings without which it would fit these GPUs, or else `instead` has GPUs that it would fit.
    """

    gpu: str
    shared: bool
    listed_bytes: int
    trainer: tuple[MemoryLine, ...]
    engine: tuple[MemoryLine, ...]
    activation_checkpointing: bool
    pack_tokens: int
    max_model_len: int
    engine_places: int | None
    memory_fraction: float | None
    kv_cache_gib: float | None
    cache_tokens: int
    gpu_bytes: int
    short: str | None = None
    instead: tuple[str, ...] = ()
    in_the_way: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.short is None


def plan(shape: ModelShape, split: MachineGpus, overrides: Overrides) -> MemoryPlan | None:
    """The first choice that fits with a large KV cache, else the fitting one with the largest, else the one
    that needs least, with `short` set. None for an unknown GPU."""
    listed = split.listed_bytes or gpu_memory.memory_bytes(split.gpu)
    if listed is None:
        return None
    weighed = (_evaluate(shape, split, chosen, listed) for chosen in _choices(shape, split, overrides))
    best = last = None
    for last in weighed:
        if last.fits and last.cache_tokens >= _COMFORTABLE_TOKENS:
            return last
        if last.fits and (best is None or last.cache_tokens > best.cache_tokens):
            best = last
    return best or last


def usable(listed: int) -> int:
    """The bytes that a plan may use of a GPU's memory; `listed`: its bytes by nvidia-smi."""
    return round(listed * assumptions.OF_THE_LISTED) - assumptions.RESERVE_BYTES


def _choices(shape: ModelShape, split: MachineGpus, overrides: Overrides) -> Iterator[Overrides]:
    """The settings to try, best first: the user's, and a choice for each that was None but the engine's
    share of the GPU (`memory_fraction`, `kv_cache_gib`)."""
    bound = min(shape.positions or CONTEXT_LENGTHS[0], CONTEXT_LENGTHS[0])
    open_lengths = [bound, *(length for length in CONTEXT_LENGTHS if length < bound)]
    lengths = [overrides.max_model_len] if overrides.max_model_len else open_lengths
    open_checkpointing = [False, True] if not split.shared else [True]
    ways = open_checkpointing if overrides.checkpointing is None else [overrides.checkpointing]
    row = _MIN_ROW_TOKENS if split.shared else max(_MIN_ROW_TOKENS, _ROW_TOKENS // split.train)
    for length in lengths:
        for checkpointing in ways:
            rows = [row, _MIN_ROW_TOKENS] if overrides.pack_tokens is None else [overrides.pack_tokens]
            for pack_tokens in dict.fromkeys(rows):
                for max_num_seqs in _sequence_counts(shape, overrides):
                    yield replace(
                        overrides,
                        max_model_len=length,
                        checkpointing=checkpointing,
                        pack_tokens=pack_tokens,
                        max_num_seqs=max_num_seqs,
                    )


def _sequence_counts(shape: ModelShape, overrides: Overrides) -> list[int | None]:
    if overrides.max_num_seqs:
        return [overrides.max_num_seqs]
    return [None, *(_FEWER_SEQUENCES if shape.linear_attention is None else _FEWER_WITH_STATES)]


def _evaluate(shape: ModelShape, split: MachineGpus, chosen: Overrides, listed: int) -> MemoryPlan:
    """The plan with these settings: the trainer's memory, the engine's share, and the KV cache that fits into
    this share. `listed`: the GPU's bytes by nvidia-smi."""
    assert chosen.max_model_len is not None
    assert chosen.pack_tokens is not None
    train = tuple(trainer.items(shape, _training(shape, split, chosen)))
    setup = _serving(shape, split, chosen, listed)
    serve = engine.items(shape, setup)
    room = usable(listed)
    fraction = _fraction(split, chosen, listed, room - total(train))
    share = round(fraction * listed * assumptions.OF_THE_LISTED)
    inside = total(serve) - assumptions.GRAPHS_BYTES
    one = engine.cache_bytes(shape, chosen.max_model_len, chosen.number_bytes)
    left = max(0, share - inside) if chosen.kv_cache_gib is None else chosen.kv_cache_gib * assumptions.GIB
    gibs = math.floor(left / assumptions.GIB * 10) / 10 if split.shared else chosen.kv_cache_gib
    cache = round(left if gibs is None else gibs * assumptions.GIB)
    share = share if chosen.kv_cache_gib is None else inside + cache
    tokens = chosen.max_model_len * cache // one
    training, serving = total(train), total(serve) + one
    serve = (*serve, _cache(cache, one, chosen.max_model_len))
    return MemoryPlan(
        gpu=split.gpu,
        shared=split.shared,
        listed_bytes=listed,
        trainer=train,
        engine=serve,
        activation_checkpointing=bool(chosen.checkpointing),
        pack_tokens=chosen.pack_tokens,
        max_model_len=chosen.max_model_len,
        engine_places=chosen.max_num_seqs,
        memory_fraction=fraction if split.shared else chosen.memory_fraction,
        kv_cache_gib=gibs,
        cache_tokens=tokens,
        gpu_bytes=training + serving if split.shared else max(training, serving),
        short=_shortfall(
            split,
            training,
            max(serving, total(serve)),
            room,
            share + assumptions.GRAPHS_BYTES,
            cache_short=cache < one,
        )
        or _too_many_sequences(
            shape, setup, chosen, cache if split.shared else round(cache * assumptions.CACHE_SHARE)
        ),
    )


def _too_many_sequences(
    shape: ModelShape, setup: engine.EngineSetup, chosen: Overrides, cache: int
) -> str | None:
    """The reason why vLLM would not start with so many places; None if it would."""
    most = engine.max_sequences(shape, cache, setup.number_bytes)
    # vLLM's own default has no places for probes beside it (engine/command.py).
    places = setup.max_num_seqs + (engine.PROBE_PLACES if chosen.max_num_seqs else 0)
    if most is None or places <= most:
        return None
    has = f"its cache has {max(most, 0)} blocks for states"
    return f"{has}, fewer than the {places} sequences that it takes at a time"


def _training(shape: ModelShape, split: MachineGpus, chosen: Overrides) -> trainer.TrainerSetup:
    return trainer.TrainerSetup(
        row=_longest_row(chosen.pack_tokens or 0, chosen.max_model_len or 0),
        checkpointing=bool(chosen.checkpointing),
        rank=chosen.rank,
        names=chosen.target_modules or shape.lora_names,
        gpus=split.train,
        number_bytes=chosen.number_bytes,
        scaled=chosen.scaled,
        reference=chosen.reference,
    )


def _longest_row(pack_tokens: int, longest: int) -> int:
    """The longest row in tokens: `pack_tokens`, or for one longer sample the next of the few fixed lengths
    (`fixed_row_lengths.py`)."""
    budget = fixed_row_lengths.whole_blocks(pack_tokens)
    return fixed_row_lengths.fixed_length(max(longest, budget), budget)


def _serving(shape: ModelShape, split: MachineGpus, chosen: Overrides, listed: int) -> engine.EngineSetup:
    places, batch = engine.defaults(split.gpu, listed)
    return engine.EngineSetup(
        rank=chosen.rank,
        names=chosen.target_modules or shape.lora_names,
        max_loras=chosen.max_loras,
        max_num_seqs=chosen.max_num_seqs or places,
        max_batched_tokens=batch,
        number_bytes=chosen.number_bytes,
    )


def _fraction(split: MachineGpus, chosen: Overrides, listed: int, left: int) -> float:
    """vLLM's `gpu_memory_utilization`, in steps of 0.01: the user's, the usual one, or on a shared GPU the
    rest. `left`: the usable bytes that the trainer leaves."""
    if chosen.memory_fraction is not None:
        return chosen.memory_fraction
    if not split.shared:
        return assumptions.ENGINE_FRACTION
    share = (left - assumptions.GRAPHS_BYTES) / (listed * assumptions.OF_THE_LISTED)
    return max(1, min(math.floor(share * _CENT), round(assumptions.ENGINE_FRACTION * _CENT))) / _CENT


def _cache(size: int, one: int, longest: int) -> MemoryLine:
    """The KV cache's line. `size`: the bytes there are for it; `one`: the bytes of one sequence of `longest`
    tokens, which the line has at least, because no engine works without it."""
    tokens = longest * max(size, one) // one
    each = round(one / longest / 1000)
    least = ": the least" if size < one else ""
    why = f"keys and values of {tokens:,} tokens, {each:,} KB each, for {longest:,} or less{least}"
    return MemoryLine("cache", max(size, one), why)


def _shortfall(
    split: MachineGpus, training: int, serving: int, room: int, share: int, *, cache_short: bool
) -> str | None:
    """The reason why it does not fit; None if it does. In bytes: `training` and `serving` are needed, `room`
    is usable, `share` is the part of it that the engine may take."""
    has = f"{split.gpu} has {format_gib(room)} to give"
    if split.shared and training + max(serving, 0 if cache_short else share) > room:
        return f"on one GPU training takes {format_gib(training)} and serving {format_gib(serving)}, {has}"
    if not split.shared and training > room:
        return f"each GPU that trains needs {format_gib(training)}, {has}"
    if cache_short or share > room:
        needed, given = format_gib(serving), format_gib(share)
        return f"each GPU that serves needs {needed}, its engine's share is {given}, {has}"
    return None


def format_gib(size: float) -> str:
    """Bytes as a text in GiB, as GPUs' memory is listed: "21.5 GiB"."""
    return f"{size / assumptions.GIB:.1f} GiB"
