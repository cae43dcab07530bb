"""The GPUs of this machine, as nvidia-smi lists them.

Neighbours: `fitness.py` and `launcher/backends/local_gpus.py` ask. Standard library only. Knows nothing of a
run's needs.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_NVIDIA_SMI_SECONDS = 60
_FIELDS = (
    "name", "driver_version", "memory.total", "compute_cap", "mig.mode.current", "uuid", "memory.used"
)  # fmt: skip
# The words of a type's name; and those of them for its form, which do not change the type.
_NAME_PARTS = re.compile(r"RTX|GTX|PRO|[A-Z]+|\d+", re.IGNORECASE)
_FORMS = re.compile(r"NVIDIA|TESLA|QUADRO|GEFORCE|SXM\d*|PCIE|NVL\d*|\d+GB?", re.IGNORECASE)


class UnfitMachineError(Exception):
    """This machine is unfit for the run; the text is the reason, in one line."""


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi; None for a value it does not give."""

    name: str
    driver: str
    memory_bytes: int | None
    capability: float | None
    is_mig: bool
    uuid: str = ""
    used_bytes: int | None = None


def list_gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists. Raises UnfitMachineError with its error message."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_NVIDIA_SMI_SECONDS
        )
    except FileNotFoundError:
        raise UnfitMachineError("there is no NVIDIA driver: nvidia-smi is not installed") from None
    except subprocess.TimeoutExpired:
        raise UnfitMachineError(
            f"the NVIDIA driver hangs: nvidia-smi did not answer for {_NVIDIA_SMI_SECONDS} s"
        ) from None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    gpus = [gpu for line in lines if (gpu := _gpu(line)) is not None]
    complaints = [line for line in lines if _gpu(line) is None]
    complaints += [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode or complaints or not gpus:
        detail = complaints[-1] if complaints else f"nvidia-smi ended with code {done.returncode}"
        raise UnfitMachineError(f"the NVIDIA driver failed: {detail}")
    return gpus


def _gpu(line: str) -> Gpu | None:
    """None for a line that is no list of the fields asked for: nvidia-smi complains on stdout, too."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_FIELDS) or not re.match(r"\d+\.", fields[1]):
        return None
    name, driver, memory, capability, mig, uuid, used = fields
    known = re.fullmatch(r"\d+\.\d+", capability)
    number = float(capability) if known else None
    return Gpu(name, driver, _mebibytes(memory), number, mig == "Enabled", uuid, _mebibytes(used))


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def is_of_type(name: str, gpu_type: str) -> bool:
    """Whether nvidia-smi's name ("NVIDIA H100 80GB HBM3") is SkyPilot's type `gpu_type` ("H100-MEGA-80GB").

    The type up to its number must stand in the name as words: A10 is no A100, L40 no L40S.
    """
    words = [word for word in re.split(r"[-_\s]+", gpu_type) if word and not _FORMS.fullmatch(word)]
    numbered = next((index for index, word in enumerate(words) if re.search(r"\d", word)), len(words) - 1)
    wanted = r"[-\s]*".join(_NAME_PARTS.findall(" ".join(words[: numbered + 1])))
    return re.search(rf"(?<![A-Z0-9]){wanted}(?![A-Z0-9])", name, re.IGNORECASE) is not None
