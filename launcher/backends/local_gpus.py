"""Chooses this computer's GPUs for a run, or reports why they cannot be used.

Neighbours: `runtime/fitness.py` has the checks, the same as on a rented machine;
`config/request_validation.py` asks before anything is built, `local_machine.py` once more when the runtime is
started, `doctor.py` at any time. Changes nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from launcher.base import disk
from launcher.base.errors import PreflightError
from launcher.types.settings import LOCAL_GPUS
from runtime import fitness, gpus, nvidia_smi
from runtime.fitness import Needs
from runtime.nvidia_smi import Gpu, UnfitMachineError

# A screen's share. A plan gives out all but about so much, and an engine does not start without its part.
_MAX_USED_SHARE = 0.05
# By default CUDA orders GPUs by speed, and nvidia-smi by their slot.
_ORDER = "CUDA_DEVICE_ORDER"
_RENT = "launch plan --gpus H100:{}  # what renting costs; without --gpus a run stays on the CPU"


class _TooFewError(UnfitMachineError):
    """Some will do, but not as many as are needed."""

    def __init__(self, why: str, enough_for: int) -> None:
        super().__init__(why)
        self.enough_for = enough_for


def choose(needs: Needs, environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs for a run, of those that `environ` makes visible. Raises PreflightError."""
    try:
        found = usable(needs, environ)
        fitness.check_memory(fitness.memory_bytes(), needs)
        fitness.check_shared_memory(needs)
        fitness.check_compiler()
    except _TooFewError as few:
        raise _refused(
            needs, few, f"run the same command with --gpus {LOCAL_GPUS}:{few.enough_for}"
        ) from None
    except UnfitMachineError as unfit:
        raise _refused(needs, unfit, _RENT.format(needs.count)) from None
    return found[: needs.count]


def usable(needs: Needs, environ: Mapping[str, str]) -> list[Gpu]:
    """All usable GPUs. Raises UnfitMachineError if they are too few, with the reason of one
    of the others."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        raise UnfitMachineError(
            f"the runtime's CUDA build needs an x86-64 processor, this is {platform.machine()}"
        )
    seen = _visible(nvidia_smi.list_gpus(), environ)
    fitness.check_driver(seen[0][1].driver, fitness.cuda_version(needs.variant))
    troubles = [_why_unfit(index, gpu, needs) for index, gpu in seen]
    found = [gpu for (_, gpu), trouble in zip(seen, troubles, strict=True) if trouble is None]
    if len(found) >= needs.count:
        return found
    first = next(filter(None, troubles), None)
    here = f"{len(found)} of the {len(seen)} here usable: {first}" if first else f"{len(found)} here"
    why = f"{needs.count} needed, {here}"
    raise _TooFewError(why, len(found)) if found else UnfitMachineError(first or why)


def variables(chosen: list[Gpu]) -> dict[str, str]:
    """The environment variables that limit a runtime to these GPUs."""
    return {gpus.VISIBLE: ",".join(gpu.uuid for gpu in chosen), _ORDER: "PCI_BUS_ID"}


def _visible(listed: list[Gpu], environ: Mapping[str, str]) -> list[tuple[int, Gpu]]:
    """The GPUs this user may use, with nvidia-smi's numbers; CUDA's own variable names them by number or
    UUID.

    Raises UnfitMachineError if it leaves none.
    """
    numbered = list(enumerate(listed))
    if environ.get(gpus.VISIBLE) is None:
        return numbered
    names = gpus.visible_gpus(environ)
    found = [one for name in names for one in numbered if _is_named(name, *one)]
    if not found:
        raise UnfitMachineError(
            f"{gpus.VISIBLE}={environ[gpus.VISIBLE]} names none of the {len(listed)} GPUs here"
        )
    return found


def _is_named(name: str, index: int, gpu: Gpu) -> bool:
    return name == str(index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def _why_unfit(index: int, gpu: Gpu, needs: Needs) -> str | None:
    """The reason this GPU will not do."""
    what = f"GPU {index} ({gpu.name})"
    if gpu.is_mig:
        return f"{what} is split by MIG: whole GPUs are needed"
    try:
        fitness.check_capability(gpu, needs)
        fitness.check_weights(gpu, needs)
    except UnfitMachineError as unfit:
        return str(unfit)
    if gpu.memory_bytes and gpu.used_bytes and gpu.used_bytes > _MAX_USED_SHARE * gpu.memory_bytes:
        used, all_of_it = disk.format_bytes(gpu.used_bytes), disk.format_bytes(gpu.memory_bytes)
        return f"{what} is in use: {used} of its {all_of_it} are taken (nvidia-smi says by whom)"
    return None


def _refused(needs: Needs, why: UnfitMachineError, hint: str) -> PreflightError:
    return PreflightError(f"--gpus {needs.gpus}: not with this computer's GPUs", str(why), hint)
