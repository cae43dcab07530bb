"""runtime/fitness.py in the script that sets a rented machine up, run by bash; nvidia-smi is a pretence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from launcher.backends.ssh import machine_scripts
from runtime import bootstrap, fitness, nvidia_smi
from runtime.fitness import Needs
from tests.support.played_driver import A100_40, H100, Driver

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).resolve().parents[2]
FOUR = Needs("cuda", "H100:4", train_gpus=1, infer_gpus=3)
# What is free of this computer's memory is not what a machine would have.
FOUR_IDLE = replace(FOUR, train_gpus=0, infer_gpus=0)


@dataclass
class Machine:
    """A home with the environment built, and a folder first on the PATH for a pretend driver."""

    folder: Path

    def drive(self, *listed: str, code: int = 0, stderr: str = "") -> None:
        """Have nvidia-smi list these."""
        Driver(self.folder / "bin").lists(*listed, code=code, stderr=stderr)

    def set_up(self, needs: Needs, **variables: str) -> tuple[int, list[str]]:
        """The exit code and the lines of the script, with these variables of the user's."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        environ = {**os.environ, "HOME": str(self.folder), "PATH": path, "UV_OFFLINE": "1"}
        done = subprocess.run(
            ["bash", "-c", machine_scripts.setup(str(self.folder), needs)],
            cwd=REPOSITORY,
            env=environ,
            input=machine_scripts.variables_text(variables).decode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    built = bootstrap.Environment(tmp_path / ".cache" / "slipway" / "environments", "cuda")
    built.python.parent.mkdir(parents=True)
    built.python.symlink_to(sys.executable)
    (built.folder / bootstrap.MARKER).write_text("{}")
    return Machine(tmp_path)


def test_a_machine_that_is_fit_is_set_up(machine: Machine) -> None:
    machine.drive(*[H100] * 4)
    code, lines = machine.set_up(replace(FOUR_IDLE, model_bytes=10**8))
    assert code == 0, lines
    assert lines[0].startswith("4×NVIDIA H100 80GB HBM3 · driver 580.95.05 · ")
    assert (machine.folder / machine_scripts.PYTHON).read_text().rstrip().endswith("/bin/python")


def test_p15_a_proxy_that_the_machine_cannot_reach_is_not_used_there(machine: Machine) -> None:
    machine.drive(*[H100] * 4)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        there = f"http://me:secret@127.0.0.1:{proxy.getsockname()[1]}"
        given = {"HTTPS_PROXY": there, "http_proxy": "http://me:secret@127.0.0.1:1", "ALL_PROXY": "no proxy"}
        code, lines = machine.set_up(replace(FOUR_IDLE, model_bytes=10**8), **given)
    assert code == 0, lines
    assert lines[0] == "not used, because no proxy answers there from this machine: ALL_PROXY, http_proxy"
    assert "secret" not in str(lines)


@pytest.mark.parametrize(
    ("listed", "needs", "why"),
    [
        ([H100] * 3, FOUR, "H100:4 was rented, 3 of 4 GPUs are there"),
        ([H100] * 3 + [A100_40], FOUR, "H100:4 was rented, GPU 3 is NVIDIA A100-SXM4-40GB"),
        ([A100_40], Needs("cuda", "A100-80GB:1"),
         "A100-80GB:1 was rented, GPU 0 (NVIDIA A100-SXM4-40GB) has 42.9 GB of memory"),
        ([H100.replace("Disabled", "Enabled")] * 4, FOUR,
         "GPU 0 (NVIDIA H100 80GB HBM3) is split by MIG: whole GPUs are needed"),
        ([H100.replace("580.95.05", "535.183.01")] * 4, FOUR,
         "driver 535.183.01 is too old for CUDA 13.0: it needs 580 or newer"),
        (["Tesla V100-SXM2-16GB, 580.95.05, 16384, 7.0, [N/A]"], Needs("cuda", "V100:1", dtype="float32"),
         "Tesla V100-SXM2-16GB has compute capability 7.0: CUDA 13.0 needs 7.5 or newer"),
        (["Tesla T4, 580.95.05, 15360, 7.5, [N/A]"], Needs("cuda", "T4:1"),
         "Tesla T4 has compute capability 7.5: bfloat16 needs 8.0 or newer"),
        ([H100], Needs("cuda", "H100:1", model_bytes=60 * 10**9),
         "the model's weights take 120.0 GB on a GPU, once to serve and once to train;"
         " NVIDIA H100 80GB HBM3 has 85.5 GB"),
        ([H100], Needs("cuda", "H100:1", model_bytes=60 * 10**9, gpu_bytes=90 * 2**30),
         "the run was planned with 90.0 GiB of a GPU, NVIDIA H100 80GB HBM3 has 78.0 GiB to give"),
        (["NVIDIA L4, 580.95.05, [N/A], [N/A], [N/A]"], Needs("cuda", "L4:1", infer_gpus=10**6),
         "the memory is too small: "),
        ([H100.replace("81559", "[N/A]")] * 4, replace(FOUR_IDLE, model_bytes=10**15),
         "the disk is too small: "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_the_last_line_before_anything_is_installed(
    machine: Machine, listed: list[str], needs: Needs, why: str
) -> None:
    machine.drive(*listed)
    code, lines = machine.set_up(needs)
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith(why)
    assert not (machine.folder / machine_scripts.PYTHON).exists()


def test_a_driver_that_is_not_there_or_in_trouble_is_said_in_its_own_words(machine: Machine) -> None:
    assert machine.set_up(FOUR) == (1, ["there is no NVIDIA driver: nvidia-smi is not installed"])
    trouble = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    machine.drive(trouble, code=9)
    assert machine.set_up(FOUR) == (1, [f"the NVIDIA driver failed: {trouble}"])
    lost = "Unable to determine the device handle for GPU0000:19:00.0: GPU is lost."
    machine.drive(*[H100] * 3, lost)
    assert machine.set_up(FOUR)[1] == [f"the NVIDIA driver failed: {lost}"]
    machine.drive(code=6)
    assert machine.set_up(FOUR)[1] == ["the NVIDIA driver failed: nvidia-smi ended with code 6"]


def test_what_was_planned_of_a_gpu_is_what_is_looked_for_on_it() -> None:
    gpu = nvidia_smi.Gpu("NVIDIA H100 80GB HBM3", "580.95.05", 81559 * 2**20, 9.0, is_mig=False, uuid="GPU-0")
    fitness.check_weights(gpu, Needs("cuda", "H100:1", model_bytes=60 * 10**9, gpu_bytes=70 * 2**30))


def test_each_engine_and_training_process_has_its_memory() -> None:
    fitness.check_memory(12 * 10**9, FOUR)
    with pytest.raises(nvidia_smi.UnfitMachineError) as unfit:
        fitness.check_memory(12 * 10**9 - 1, FOUR)
    assert str(unfit.value) == "the memory is too small: 12.0 GB are free, 4 processes need 12.0 GB"
    assert fitness.memory_bytes() < 10**15


SMALL = """
mount -t tmpfs -o size="$2" none "$1" && exec "$3" -c '
import sys
from pathlib import Path
from runtime import fitness, nvidia_smi
needs = fitness.Needs("cuda", "H100:4", train_gpus=int(sys.argv[2]))
try:
    print(fitness.check_shared_memory(needs, Path(sys.argv[1])))
except nvidia_smi.UnfitMachineError as unfit:
    print(unfit)
' "$1" "$4"
"""


def shared_memory(folder: Path, size: str, train_gpus: int) -> str | None:
    """What is said of a /dev/shm of this size; None where this user may not mount one."""
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SMALL, "sh", folder, size, sys.executable, str(train_gpus)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 1 and ("unshare" in done.stderr or "mount" in done.stderr):
        return None
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("size", "train_gpus", "said"),
    [
        ("64m", 1, "0.1 GB of /dev/shm free"),
        ("64m", 2, "/dev/shm is too small: 0.1 GB of its 0.1 GB are free, 2 training processes need 1.0 GB;"
         " start the container with --ipc=host or --shm-size=2g"),
        ("2g", 2, "None"),
    ],
)  # fmt: skip
def test_dockers_own_64_mb_of_shared_memory_are_refused_where_several_processes_train(
    tmp_path: Path, size: str, train_gpus: int, said: str
) -> None:
    assert shared_memory(tmp_path, size, train_gpus) in (said, None)


def test_shared_memory_that_is_full_or_not_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = replace(FOUR, train_gpus=2)
    with pytest.raises(nvidia_smi.UnfitMachineError, match=r"0\.0 GB of its 0\.0 GB are free"):
        fitness.check_shared_memory(several, tmp_path / "shm")
    full = os.statvfs_result((4096, 4096, 2**22, 5000, 5000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    with pytest.raises(
        nvidia_smi.UnfitMachineError, match=r"0\.0 GB of its 17\.2 GB are free, 2 training processes"
    ):
        fitness.check_shared_memory(several)
    assert fitness.check_shared_memory(FOUR) == "0.0 GB of /dev/shm free"


def test_kernels_need_a_compiler_and_pythons_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(nvidia_smi.UnfitMachineError, match="there is no C compiler"):
        fitness.check_compiler()
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.setattr(fitness, "HEADERS", tmp_path)
    with pytest.raises(nvidia_smi.UnfitMachineError, match=f"are not in {tmp_path}: python3-dev"):
        fitness.check_compiler()
    (tmp_path / "Python.h").touch()
    fitness.check_compiler()


def test_a_python_without_headers_is_left_for_one_of_uvs(machine: Machine) -> None:
    machine.drive(*[H100] * 4)
    bare = machine.folder / "bin" / "python3"
    bare.write_text(f'#!/bin/sh\ncase "$*" in *Python.h*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    uv = machine.folder / "bin" / "uv"
    uv.write_text(
        f'#!/bin/sh\necho "$*" >> {machine.folder}/asked\n[ $2 = install ] || echo {sys.executable}\n'
    )
    for tool in (bare, uv):
        tool.chmod(0o755)
    code, lines = machine.set_up(replace(FOUR_IDLE, model_bytes=10**8))
    assert code == 0, lines
    assert (machine.folder / "asked").read_text().splitlines() == ["python install 3.12", "python find 3.12"]


def test_the_disk_must_hold_the_environment_where_it_is_not_built(tmp_path: Path) -> None:
    enormous = Needs("cuda", "H100:4", model_bytes=10**15)
    with pytest.raises(nvidia_smi.UnfitMachineError) as unfit:
        fitness.check_disk(tmp_path, enormous)
    needed = (10**15 + 2 * 10**9 + bootstrap.NEEDED_BYTES["cuda"]) / 1e9
    assert f"the runtime's environment needs {needed:.1f} GB, 1000000.0 GB of that the model" in str(
        unfit.value
    )


@pytest.mark.parametrize(
    ("name", "rented", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 80GB HBM3", "H100-MEGA-80GB", True),
        ("NVIDIA H100 80GB HBM3", "h100-sxm", True),
        ("NVIDIA H100 NVL", "H100-NVL", True),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM", True),
        ("NVIDIA A10-24Q", "A10", True),
        ("NVIDIA RTX A6000", "RTXA6000", True),
        ("NVIDIA RTX A6000", "A6000", True),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX3090-Ti", True),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX1080Ti", True),
        ("NVIDIA GeForce RTX 4090", "NVIDIA-GeForce-RTX-4090", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000", True),
        ("Tesla V100-SXM2-32GB", "V100-32GB", True),
        ("NVIDIA GH200 480GB", "GH200", True),
        ("NVIDIA GH200 480GB", "H200", False),
        ("NVIDIA A100-SXM4-40GB", "A10", False),
        ("NVIDIA A10G", "A10", False),
        ("NVIDIA L40S", "L40", False),
        ("NVIDIA L40S", "L4", False),
        ("NVIDIA H200", "H100", False),
        ("NVIDIA RTX A6000", "RTX6000", False),
    ],
)
def test_a_type_is_known_by_the_drivers_name_for_it(name: str, rented: str, same: bool) -> None:
    assert nvidia_smi.is_of_type(name, rented) is same


def test_the_cuda_that_is_pinned_is_one_whose_driver_is_known() -> None:
    assert int(fitness.cuda_version("cuda").partition(".")[0]) in fitness.NEEDED_BY_CUDA
