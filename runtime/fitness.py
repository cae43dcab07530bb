"""Checks that a machine's GPUs fit a run, before the long install.

    python -m runtime.fitness --variant cuda --gpus H100:4 --root DIR     one line; code 1: why it cannot

GPUs by type and number, the driver against the CUDA that the pinned packages are built for, memory, the
shared memory between processes, and disk for the environment and the model. Neighbours: `nvidia_smi.py` lists
the GPUs, `launcher/backends/ssh/machine_scripts.py` runs it first of all on a rented machine,
`launcher/backends/local_gpus.py` asks it of this computer, `bootstrap.py` builds the environment that is
checked for here. Standard library only. Knows nothing of renting.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from runtime import bootstrap
from runtime.nvidia_smi import Gpu, UnfitMachineError, is_of_type, list_gpus
from runtime.shared import gpu_memory
from runtime.shared.memory.planning import format_gib, usable

# The least driver, and the least compute capability, for programs of a CUDA major version
# (docs.nvidia.com/deploy/cuda-compatibility: all of its minor versions run; 13 dropped GPUs before Turing).
NEEDED_BY_CUDA = {12: (525, 5.0), 13: (580, 7.5)}
# As vLLM has it.
_BFLOAT16_CAPABILITY = 8.0
# The memory of the computer that each engine and each training process takes beside the weights, which are
# memory-mapped files.
_PROCESS_BYTES = 3 * 10**9
# Checkpoints, samples and logs of a run.
_RUN_BYTES = 2 * 10**9
# The processes of one computer hand each other their tensors through it.
SHARED_MEMORY = Path("/dev/shm")
# Where Triton looks for them.
HEADERS = Path(sysconfig.get_path("include", "posix_prefix"))
# As NVIDIA asks of a container for NCCL: about 10 MB for each channel between two processes.
_SHARED_MEMORY_BYTES = 10**9
# A GPU called 80GB reports 79.6 GiB; one called 40GB is not taken for it.
_MIN_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Needs:
    """A run's needs: `gpus` as rented ("H100:4"), and their split. `gpu_bytes`: the planned use of each
    GPU's memory (`shared/memory/`), 0 if unknown."""

    variant: str
    gpus: str
    train_gpus: int = 1
    infer_gpus: int = 1
    model_bytes: int = 0
    dtype: str = "bfloat16"
    gpu_bytes: int = 0

    @property
    def type(self) -> str:
        return self.gpus.rpartition(":")[0]

    @property
    def count(self) -> int:
        return int(self.gpus.rpartition(":")[2])


def check(needs: Needs, root: Path) -> str:
    """All checks; a summary in one line. Raises UnfitMachineError."""
    found = []
    if needs.variant == "cuda":
        gpus = list_gpus()
        _check_gpus(gpus, needs)
        check_driver(gpus[0].driver, cuda_version(needs.variant))
        check_capability(gpus[0], needs)
        check_weights(gpus[0], needs)
        check_memory(memory_bytes(), needs)
        check_compiler()
        found += [f"{len(gpus)}×{gpus[0].name}", f"driver {gpus[0].driver}"]
        found += filter(None, [check_shared_memory(needs)])
    free = check_disk(root, needs)
    return " · ".join([*found, f"{_gb(free)} of disk free"])


def _check_gpus(gpus: list[Gpu], needs: Needs) -> None:
    """Each is whole, of the type rented, and there are enough. Raises UnfitMachineError."""
    if len(gpus) < needs.count:
        raise UnfitMachineError(f"{needs.gpus} was rented, {len(gpus)} of {needs.count} GPUs are there")
    for index, gpu in enumerate(gpus):
        if gpu.is_mig:
            raise UnfitMachineError(f"GPU {index} ({gpu.name}) is split by MIG: whole GPUs are needed")
        if not is_of_type(gpu.name, needs.type):
            raise UnfitMachineError(f"{needs.gpus} was rented, GPU {index} is {gpu.name}")
        least = gpu_memory.memory_bytes(needs.type) or 0
        if gpu.memory_bytes is not None and gpu.memory_bytes < least * _MIN_MEMORY_SHARE:
            raise UnfitMachineError(
                f"{needs.gpus} was rented, GPU {index} ({gpu.name}) has {_gb(gpu.memory_bytes)} of memory"
            )


def cuda_version(variant: str) -> str:
    """The CUDA that a variant's pinned packages are built for: "13.0"."""
    lock = (bootstrap.REQUIREMENTS / f"{variant}.txt").read_text()
    pinned = re.search(r"^cuda-toolkit==(\d+\.\d+)", lock, re.MULTILINE)
    if pinned is None:
        raise UnfitMachineError(
            f"requirements/{variant}.txt pins no cuda-toolkit: which driver it needs is unknown"
        )
    return pinned.group(1)


def check_driver(driver: str, cuda: str) -> None:
    """New enough for programs of that CUDA. Raises UnfitMachineError."""
    least = NEEDED_BY_CUDA[int(cuda.partition(".")[0])][0]
    if int(driver.partition(".")[0]) < least:
        raise UnfitMachineError(f"driver {driver} is too old for CUDA {cuda}: it needs {least} or newer")


def check_capability(gpu: Gpu, needs: Needs) -> None:
    """The pinned packages have code for this GPU. Raises UnfitMachineError."""
    cuda = cuda_version(needs.variant)
    least, what = NEEDED_BY_CUDA[int(cuda.partition(".")[0])][1], f"CUDA {cuda}"
    if needs.dtype == "bfloat16" and least < _BFLOAT16_CAPABILITY:
        least, what = _BFLOAT16_CAPABILITY, "bfloat16"
    if gpu.capability is not None and gpu.capability < least:
        raise UnfitMachineError(
            f"{gpu.name} has compute capability {gpu.capability}: {what} needs {least} or newer"
        )


def check_weights(gpu: Gpu, needs: Needs) -> None:
    """Each engine has the whole model on one GPU; one that is shared has it twice.
    Raises UnfitMachineError."""
    shared = needs.train_gpus + needs.infer_gpus > needs.count
    if needs.gpu_bytes:
        _check_planned(gpu, needs)
        return
    wanted = needs.model_bytes * (2 if shared else 1)
    if gpu.memory_bytes is not None and wanted > gpu.memory_bytes:
        twice = ", once to serve and once to train" if shared else ""
        raise UnfitMachineError(
            f"the model's weights take {_gb(wanted)} on a GPU{twice}; {gpu.name} has {_gb(gpu.memory_bytes)}"
        )


def _check_planned(gpu: Gpu, needs: Needs) -> None:
    if gpu.memory_bytes is not None and needs.gpu_bytes > usable(gpu.memory_bytes):
        raise UnfitMachineError(
            f"the run was planned with {format_gib(needs.gpu_bytes)} of a GPU,"
            f" {gpu.name} has {format_gib(usable(gpu.memory_bytes))} to give"
        )


def memory_bytes() -> int:
    """The available memory, within a container's bound."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    found = int(available.group(1)) * 1024 if available else sys.maxsize
    try:
        return min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a bound
        return found


def check_memory(available: int, needs: Needs) -> None:
    """Room for the engines and the training processes. Raises UnfitMachineError."""
    processes = needs.train_gpus + needs.infer_gpus
    if available < processes * _PROCESS_BYTES:
        raise UnfitMachineError(
            f"the memory is too small: {_gb(available)} are free,"
            f" {processes} processes need {_gb(processes * _PROCESS_BYTES)}"
        )


def check_compiler() -> None:
    """Triton compiles the launchers of its kernels (in vLLM and torch) when they first run: it needs a C
    compiler and Python's own headers. Raises UnfitMachineError."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UnfitMachineError("there is no C compiler, which builds kernels: apt-get install gcc")
    if not (HEADERS / "Python.h").is_file():
        raise UnfitMachineError(
            f"Python's headers, with which kernels are built, are not in {HEADERS}: python3-dev"
        )


def check_shared_memory(needs: Needs, folder: Path = SHARED_MEMORY) -> str | None:
    """Several training processes hand each other gradients through /dev/shm wherever one GPU cannot reach the
    other's memory, and in docker's own 64 MB NCCL ends the first step with an "unhandled system error": that
    is refused. One training process, and engines of one GPU each, put nothing there: then a small one is only
    mentioned, in the words returned. Raises UnfitMachineError.
    """
    try:
        found = os.statvfs(folder)
        free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    except FileNotFoundError:
        free = size = 0
    if free >= _SHARED_MEMORY_BYTES:
        return None
    if needs.train_gpus == 1:
        return f"{_gb(free)} of /dev/shm free"
    raise UnfitMachineError(
        f"/dev/shm is too small: {_gb(free)} of its {_gb(size)} are free,"
        f" {needs.train_gpus} training processes need {_gb(_SHARED_MEMORY_BYTES)};"
        " start the container with --ipc=host or --shm-size=2g"
    )


def check_disk(root: Path, needs: Needs) -> int:
    """Check the room for the model, and for the environment if it is not built. Returns the free bytes.
    Raises UnfitMachineError."""
    root.mkdir(parents=True, exist_ok=True)
    built = bootstrap.is_ready(root, needs.variant)
    wanted = needs.model_bytes + _RUN_BYTES + (0 if built else bootstrap.NEEDED_BYTES[needs.variant])
    free = shutil.disk_usage(root).free
    if free < wanted:
        what = "the run" if built else "the runtime's environment"
        model = f", {_gb(needs.model_bytes)} of that the model" if needs.model_bytes else ""
        raise UnfitMachineError(
            f"the disk is too small: {_gb(free)} are free, {what} needs {_gb(wanted)}{model}"
        )
    return free


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True, choices=bootstrap.VARIANTS)
    parser.add_argument("--gpus", required=True, help="TYPE:COUNT, as rented")
    parser.add_argument("--train-gpus", type=int, default=1)
    parser.add_argument("--infer-gpus", type=int, default=1)
    parser.add_argument("--model-bytes", type=int, default=0, help="0: not known")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpu-bytes", type=int, default=0, help="planned of each GPU; 0: not known")
    parser.add_argument("--root", required=True, type=Path, help="where environments are built")
    given = vars(parser.parse_args())
    root = given.pop("root")
    try:
        sys.stdout.write(check(Needs(**given), root) + "\n")
    except UnfitMachineError as unfit:
        sys.stdout.write(f"{unfit}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
