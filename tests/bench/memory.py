"""What six sizes of Qwen3 take of one, four and eight H100s, as planned: `python -m tests.bench.memory`.

Prints one JSON object, a summary; `--write` writes every byte with its reason into `memory.txt` beside this,
which `tests/unit/test_memory.py` compares with the arithmetic. Nothing in it was measured on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.config import memory_table
from launcher.models import known_models
from launcher.types.plan import split_gpus
from runtime.shared.memory.memory_item import total
from runtime.shared.memory.planning import MachineGpus, MemoryPlan, Overrides, format_gib
from runtime.shared.memory.suggestions import plan_with_suggestions
from runtime.shared.model_shape import shape

MODELS = tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"))
COUNTS = (1, 4, 8)
FILE = Path(__file__).parent / "memory.txt"


def plans() -> Iterator[tuple[str, int, MemoryPlan]]:
    """Model, how many H100s, and the plan with nothing set by anybody."""
    for model in MODELS:
        of = shape(known_models.config_of(model) or {})
        assert of is not None
        for count in COUNTS:
            found = plan_with_suggestions(of, MachineGpus("H100", count, *split_gpus(count)), Overrides())
            assert found is not None
            yield model, count, found


def tables() -> str:
    """All of it as text."""
    return "\n".join(_table(*one) for one in plans())


def _table(model: str, count: int, memory: MemoryPlan) -> str:
    refused = "" if memory.fits else f"\n  {memory.short}; it would fit {' or '.join(memory.instead)}"
    return f"{model} on H100:{count}\n{memory_table.text(memory)}{refused}\n"


def summary(memory: MemoryPlan) -> dict[str, object]:
    """The plan in one line."""
    return {
        "training": format_gib(total(memory.trainer)),
        "serving": format_gib(total(memory.engine)),
        "checkpointing": memory.activation_checkpointing,
        "pack_tokens": memory.pack_tokens,
        "longest": memory.max_model_len,
        "cache_tokens": memory.cache_tokens,
        "memory_fraction": memory.memory_fraction,
        "short": memory.short,
        "instead": memory.instead,
    }


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(tables())
    print(json.dumps({f"{model} on H100:{count}": summary(memory) for model, count, memory in plans()}))
