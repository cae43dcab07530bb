"""Calculates whether a model fits the requested GPUs, before anything is rented or built.

Neighbours: `pricing.py` puts the result into the plan, `rented_run.py` hands it to the runtime,
`launching.py` and `plan_verb.py` refuse by it, `memory_table.py` shows it. The arithmetic is
`runtime/shared/memory/`; knows no prices.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError
from launcher.config import runtime_config
from launcher.models import known_models, model_config
from launcher.types.offers import gpus_of, plan_command
from launcher.types.plan import GpuSplit, Plan
from launcher.types.settings import Settings
from runtime.shared import model_shape
from runtime.shared.memory import suggestions
from runtime.shared.memory.planning import MachineGpus, MemoryPlan, Overrides
from runtime.shared.peft_format import Lora

_NUMBER_BYTES = {"bfloat16": 2, "float32": 4}


def plan_memory(
    settings: Settings, gpus: GpuSplit, kind: str, listed_bytes: int | None = None
) -> tuple[MemoryPlan | None, str | None]:
    """The memory of a run on GPUs of this kind, None if model or GPU are unknown; and a remark on that.

    `listed_bytes`: the GPU's memory as its own driver lists it, if it does.
    """
    token = settings.secrets.get("HF_TOKEN")
    found = model_config.find_config(settings.model, os.environ, token.value if token else None)
    shape = None if found is None else model_shape.shape(found.config)
    if found is None or shape is None:
        why = "its config.json is neither on this computer nor in launch's table of known models"
        why = "it has no config.json that can be read" if Path(settings.model).expanduser().is_dir() else why
        meant = known_models.closest_model(settings.model)
        why += f"; did you mean {meant}?" if meant else ""
        reason = why if found is None else "its config.json does not say how large its layers are"
        return None, f"whether {settings.model} fits is not known: {reason}"
    kind = kind.removeprefix("NVIDIA ")
    machine = MachineGpus(kind, gpus_of(gpus.gpus)[1], gpus.train_gpus, gpus.infer_gpus, listed_bytes)
    weighed = suggestions.plan_with_suggestions(shape, machine, _overrides(settings, gpus))
    if weighed is None:
        return None, f"whether {settings.model} fits is not known: launch has no figure for {kind}'s memory"
    remark = None
    if found.table_date is not None:
        remark = f"memory is planned for {settings.model}'s shape as launch knew it on {found.table_date}"
    return weighed, remark


def _overrides(settings: Settings, gpus: GpuSplit) -> Overrides:
    """The settings that the user set; the plan chooses the rest."""
    config = runtime_config.user_values(settings.runtime)
    train, engine = config.train, config.engine
    lora = Lora(train.lora.rank, train.lora.alpha, train.lora.use_rslora)

    def if_set(key: str, value: Any) -> Any:
        return value if key in settings.runtime else None

    return Overrides(
        rank=lora.rank,
        target_modules=train.lora.target_modules,
        scaled=lora.scale != 1,
        max_loras=max(engine.max_loras, config.max_staleness + 2),
        number_bytes=_NUMBER_BYTES[gpus.dtype],
        reference=train.kl_beta > 0,
        checkpointing=if_set("train.activation_checkpointing", train.activation_checkpointing),
        pack_tokens=if_set("train.pack_tokens", train.pack_tokens),
        max_model_len=if_set("engine.max_model_len", engine.max_model_len),
        max_num_seqs=if_set("engine.max_num_seqs", engine.max_num_seqs),
        memory_fraction=if_set("engine.memory_fraction", engine.memory_fraction),
        kv_cache_gib=if_set("engine.kv_cache_gib", engine.kv_cache_gib),
    )


def refuse_too_small(plan: Plan, settings: Settings) -> None:
    """Raises PreflightError, with GPUs that would fit, if the run's GPUs are too small for its model."""
    if plan.gpus is not None:
        refuse_gpus(settings, plan.gpus)


def refuse_gpus(settings: Settings, gpus: GpuSplit) -> None:
    """The same by the GPUs alone."""
    memory = gpus.memory
    if memory is None or memory.short is None:
        return
    if memory.in_the_way:
        kept = {key: value for key, value in settings.values.items() if key not in memory.in_the_way}
        without = f"  # without {', '.join(memory.in_the_way)}"
        hint = f"{plan_command(replace(settings, values=kept), gpus.gpus)}{without}"
    elif memory.instead:
        others = f"  # or {', '.join(memory.instead[1:])}" if memory.instead[1:] else ""
        hint = f"{plan_command(settings, memory.instead[0])}{others}"
    else:
        hint = "choose a smaller model: no GPU that launch knows is large enough for this one"
    raise PreflightError(f"{settings.model} does not fit {gpus.gpus}", memory.short, hint)
