"""Plans a run's GPU memory: chooses settings that fit, and gives each byte its reason.

Neighbours: the launcher asks before anything is rented and hands the chosen settings to the runtime;
`trainer.py` and `engine.py` have the arithmetic, `fitness.py` looks for `MemoryPlan.gpu_bytes` on the
machine. Pure: no torch.

The rule of choice: every sequence that an engine can sample must be trainable, so the longest sequence comes
first, up to 32,768 tokens. Next comes a trainer that computes nothing twice, unless the GPU is shared, where
memory is worth more as cache. Next come rows long enough to keep a GPU busy, and last as many places as
vLLM's own default. A cache for few sequences at a time is taken only if no shorter length has a larger one.
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
# Rows of a step are dealt out to the GPUs that train: more of them, shorter rows.
_ROW, _LEAST_ROW = 16384, 4096
_FEWER_SEQUENCES = (256, 64)
# Of the cache: sixteen answers of 2,048 tokens at a time.
_COMFORTABLE_TOKENS = 32768
_CENT = 100


@dataclass(frozen=True)
class Overrides:
    """The settings that the user set and the plan keeps; None for the others. `number_bytes`: two or four, by
    the dtype."""

    rank: int = 16
    names: tuple[str, ...] | None = None
    scaled: bool = False
    slots: int = 4
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
    """`count` GPUs of a kind, `train` and `infer` of them; with one both share it. `listed_bytes`: the memory
    of each, if it is known better than by the kind."""

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
    """The plan of one GPU that trains and one that serves (or the one that does both): lines, and the chosen
    settings.

    `engine_places`, `memory_fraction` and `kv_cache_gib` None are the engine's own. On a shared GPU the
    engine's cache is set, because its own measurement would count the trainer's memory. `short` is the reason
    why it does not fit, None if it does. `gpu_bytes`: the least free memory a GPU must have, with a cache for
    one longest sequence. `instead`: GPUs that it would fit, and `in_the_way`: keys without which it would fit
    these.
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
    """The first choice that fits, else the one that needs least, with `short`. None for an unknown GPU."""
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
    """The part of a GPU's memory, as nvidia-smi lists it, that a plan may use."""
    return round(listed * assumptions.OF_THE_LISTED) - assumptions.RESERVE_BYTES


def _choices(shape: ModelShape, split: MachineGpus, overrides: Overrides) -> Iterator[Overrides]:
    """Wishes with nothing left open but the share of the GPU, best first."""
    bound = min(shape.positions or CONTEXT_LENGTHS[0], CONTEXT_LENGTHS[0])
    open_lengths = [bound, *(length for length in CONTEXT_LENGTHS if length < bound)]
    lengths = [overrides.max_model_len] if overrides.max_model_len else open_lengths
    again = [False, True] if not split.shared else [True]
    ways = again if overrides.checkpointing is None else [overrides.checkpointing]
    row = _LEAST_ROW if split.shared else max(_LEAST_ROW, _ROW // split.train)
    for length in lengths:
        for checkpointing in ways:
            rows = [row, _LEAST_ROW] if overrides.pack_tokens is None else [overrides.pack_tokens]
            for pack_tokens in dict.fromkeys(rows):
                for places in _sequence_counts(overrides):
                    yield replace(
                        overrides,
                        max_model_len=length,
                        checkpointing=checkpointing,
                        pack_tokens=pack_tokens,
                        max_num_seqs=places,
                    )


def _sequence_counts(overrides: Overrides) -> list[int | None]:
    return [overrides.max_num_seqs] if overrides.max_num_seqs else [None, *_FEWER_SEQUENCES]


def _evaluate(shape: ModelShape, split: MachineGpus, chosen: Overrides, listed: int) -> MemoryPlan:
    """Everything on the scales: the trainer first, the engine's share, and the cache that is left of it."""
    assert chosen.max_model_len is not None
    assert chosen.pack_tokens is not None
    train = tuple(trainer.items(shape, _training(shape, split, chosen)))
    serve = engine.items(shape, _serving(shape, split, chosen, listed))
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
        ),
    )


def _training(shape: ModelShape, split: MachineGpus, chosen: Overrides) -> trainer.TrainerSetup:
    return trainer.TrainerSetup(
        row=_longest_row(chosen.pack_tokens or 0, chosen.max_model_len or 0),
        checkpointing=bool(chosen.checkpointing),
        rank=chosen.rank,
        names=chosen.names or shape.lora_names,
        gpus=split.train,
        number_bytes=chosen.number_bytes,
        scaled=chosen.scaled,
        reference=chosen.reference,
    )


def _longest_row(pack_tokens: int, longest: int) -> int:
    """Rows on a GPU have the length of a pack, or for one longer sample another of the few that there are."""
    budget = fixed_row_lengths.whole_blocks(pack_tokens)
    return fixed_row_lengths.fixed_length(max(longest, budget), budget)


def _serving(shape: ModelShape, split: MachineGpus, chosen: Overrides, listed: int) -> engine.EngineSetup:
    places, batch = engine.defaults(split.gpu, listed)
    return engine.EngineSetup(
        rank=chosen.rank,
        names=chosen.names or shape.lora_names,
        max_loras=chosen.slots,
        max_num_seqs=chosen.max_num_seqs or places,
        max_batched_tokens=batch,
        number_bytes=chosen.number_bytes,
    )


def _fraction(split: MachineGpus, chosen: Overrides, listed: int, left: int) -> float:
    """vLLM's share of its GPU, to the cent: the user's, or the rest that the trainer leaves if both are on
    one."""
    if chosen.memory_fraction is not None:
        return chosen.memory_fraction
    if not split.shared:
        return assumptions.ENGINE_FRACTION
    share = (left - assumptions.GRAPHS_BYTES) / (listed * assumptions.OF_THE_LISTED)
    return max(1, min(math.floor(share * _CENT), round(assumptions.ENGINE_FRACTION * _CENT))) / _CENT


def _cache(size: int, one: int, longest: int) -> MemoryLine:
    """With less room than for one longest sequence, the size that this needs: no engine works without it."""
    tokens = longest * max(size, one) // one
    each = round(one / longest / 1000)
    least = ": the least" if size < one else ""
    why = f"keys and values of {tokens:,} tokens, {each:,} KB each, for {longest:,} or less{least}"
    return MemoryLine("cache", max(size, one), why)


def _shortfall(
    split: MachineGpus, training: int, serving: int, room: int, share: int, *, cache_short: bool
) -> str | None:
    """The reason why it does not fit, by the table's sums; None if it does. `share`: the memory the engine
    may take."""
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
    """Bytes in the unit that GPUs are listed in."""
    return f"{size / assumptions.GIB:.1f} GiB"
