"""The first line of `launch plan`: whether it fits, its price, and the one thing to change.

Neighbours: `plan_verb.py` prints it above the plan's details. Sends no request.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from launcher.base import embedded_models
from launcher.base.errors import LaunchError
from launcher.types.plan import GpuSplit, LocalGpus
from launcher.types.settings import Settings


@dataclass(frozen=True)
class Verdict:
    """`fits` is None where it is not known. `refused`: the reason that a run would be refused. `change`: the
    one thing to change, None for nothing."""

    fits: bool | None
    refused: str | None
    change: str | None

    def line(self, plan: str) -> str:
        """ "Fits: 4×H100 on lambda, …. Nothing to change." """
        known = {True: "Fits", False: "Does not fit", None: "Fit not known"}[self.fits]
        head = f"Refused ({self.refused})" if self.refused and self.fits is not False else known
        return f"{head}: {plan}. {f'Change: {self.change}' if self.change else 'Nothing to change.'}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    settings: Settings, gpus: GpuSplit | None, refused: LaunchError | None, prices: str | None
) -> Verdict:
    """The verdict on a plan. `refused`: the error that a run would raise; `prices`: the command that brings
    the prices a run needs, if they are not here."""
    memory = gpus.memory if gpus else None
    is_small = gpus is None and embedded_models.is_embedded(settings.model)
    fits = memory.fits if memory else True if is_small else None
    model = settings.values.get("model")
    reason = refused.message if refused else None
    change = None
    if isinstance(gpus, LocalGpus) and gpus.without_memory:
        reason = reason or "no GPU of this computer will do"
        change = "rent GPUs, such as --gpus H100:1, or leave out --gpus"
    elif memory is not None and not memory.fits:
        change = f"--gpus {memory.instead[0]}" if memory.instead else "a smaller --model"
        change = f"leave out {', '.join(memory.in_the_way)}" if memory.in_the_way else change
    elif refused is not None:
        change = refused.hint
    elif settings.rented and model is not None and model.source == "default":
        change = f"name the model with --model; without it {settings.model} is trained"
    elif prices is not None:
        change = f"fetch the prices: {prices}"
    return Verdict(fits, reason, change)
