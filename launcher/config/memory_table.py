"""A run's GPU memory as text: the table of `launch plan`, and one line beside the price.

Neighbours: `plan_verb.py` shows it, `price_agreement.py` has the line, `memory_fit.py` calculates the
figures.
"""

from __future__ import annotations

from launcher.base.layout import columns
from runtime.shared.memory.memory_item import MemoryLine, total
from runtime.shared.memory.planning import MemoryPlan, format_gib, usable


def line(memory: MemoryPlan) -> str:
    """The fit in one line."""
    train, serve = format_gib(total(memory.trainer)), format_gib(total(memory.engine))
    where = "on one GPU" if memory.shared else "a GPU"
    room = format_gib(usable(memory.listed_bytes))
    return f"training takes {train}, serving {serve} {where}, of {room}{_verdict(memory)}"


def text(memory: MemoryPlan) -> str:
    """Each byte with its reason, and the settings that were chosen to fit."""
    whose = "the GPU that trains and serves" if memory.shared else "a GPU that trains, and of one that serves"
    given = format_gib(usable(memory.listed_bytes))
    room = f"{memory.gpu} has {format_gib(memory.listed_bytes)}, of which {given} are planned"
    rows = _part("training", memory.trainer) + _part("serving", memory.engine)
    verdict = f"  {room}{_verdict(memory)}, by arithmetic that no GPU has confirmed"
    return "\n".join([f"  MEMORY OF {whose.upper()}", columns(rows), verdict, *_choices(memory)])


def _part(name: str, lines: tuple[MemoryLine, ...]) -> list[list[str]]:
    each = [[f"    {line.name}", format_gib(line.size).rjust(10), line.why] for line in lines]
    return [[f"  {name}", format_gib(total(lines)).rjust(10), ""], *each]


def _verdict(memory: MemoryPlan) -> str:
    return ": fits" if memory.fits else ": DOES NOT FIT"


def _choices(memory: MemoryPlan) -> list[str]:
    """The settings that the plan hands to the run; a setting of the user's takes precedence, and one that is
    None is the engine's own."""
    chosen = [
        f"train.activation_checkpointing={str(memory.activation_checkpointing).lower()}",
        f"train.pack_tokens={memory.pack_tokens}",
        f"engine.max_model_len={memory.max_model_len}",
    ]
    if memory.engine_places is not None:
        chosen.append(f"engine.max_num_seqs={memory.engine_places}")
    if memory.memory_fraction is not None:
        chosen.append(f"engine.memory_fraction={memory.memory_fraction:g}")
    if memory.kv_cache_gib is not None:
        chosen.append(f"engine.kv_cache_gib={memory.kv_cache_gib:g}")
    return [f"  planned  {' '.join(chosen)}"] if memory.fits else []
