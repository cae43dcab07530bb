"""`--gpus local`: which of this computer's GPUs a run takes, why it is refused, and what its runtime is told.

`nvidia-smi` is a pretence, and so is the runtime's Python: what it was started with is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.backends import local_gpus
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.records.records import RecordStore
from runtime import bootstrap, fitness
from runtime.fitness import Needs
from tests.support.environment import PROGRAMS
from tests.support.played_driver import H100, Driver, uuid
from tests.support.typed import Typed

pytestmark = pytest.mark.process

RTX = "NVIDIA GeForce RTX 4090, 580.95.05, 24564, 8.9, [N/A]"
OLD = "NVIDIA GeForce GT 1030, 580.95.05, 2048, 6.1, [N/A]"
ONE, TWO = Needs("cuda", "local:1"), Needs("cuda", "local:2")


def in_use(line: str, index: int, mebibytes: int) -> str:
    return f"{line}, {uuid(index)}, {mebibytes}"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """First on the PATH; each process of a run has its memory, whatever this computer has free."""
    found = Driver(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(fitness, "memory_bytes", lambda: 10**12)
    return found


# ------------------------------------------------------------------ which are taken


@pytest.mark.parametrize(
    ("listed", "needs", "visible", "chosen"),
    [
        ([RTX, RTX, RTX], TWO, None, [0, 1]),
        ([RTX, RTX, RTX], TWO, "2,0", [2, 0]),
        ([RTX, RTX, RTX], ONE, uuid(1), [1]),
        ([RTX, RTX, RTX], ONE, uuid(1)[:12], [1]),
        ([RTX, RTX], ONE, "1,-1,0", [1]),
        ([OLD, RTX], ONE, None, [1]),
        ([in_use(RTX, 0, 20000), RTX], ONE, None, [1]),
        ([in_use(RTX, 0, 1000)], ONE, None, [0]),
        (["NVIDIA GB10, 580.95.05, [N/A], 12.1, [N/A]"], ONE, None, [0]),
    ],
)
def test_the_first_that_will_do_are_taken_of_those_the_user_sees(
    driver: Driver, listed: list[str], needs: Needs, visible: str | None, chosen: list[int]
) -> None:
    driver.lists(*listed)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.uuid for gpu in local_gpus.choose(needs, environ)] == [uuid(index) for index in chosen]


def test_a_runtime_sees_the_chosen_ones_alone_whatever_cuda_calls_them(driver: Driver) -> None:
    driver.lists(OLD, RTX, RTX)
    assert local_gpus.variables(local_gpus.choose(TWO, {})) == {
        "CUDA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(2)}",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


@pytest.mark.parametrize(
    ("listed", "needs", "environ", "why"),
    [
        ([RTX], TWO, {}, "2 needed, 1 here"),
        ([RTX, RTX], TWO, {"CUDA_VISIBLE_DEVICES": "1"}, "2 needed, 1 here"),
        ([RTX], ONE, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= names none of the 1 GPUs here"),
        ([RTX], ONE, {"CUDA_VISIBLE_DEVICES": "MIG-4"},
         "CUDA_VISIBLE_DEVICES=MIG-4 names none of the 1 GPUs here"),
        ([RTX.replace("580.95.05", "570.12")], ONE, {},
         "driver 570.12 is too old for CUDA 13.0: it needs 580 or newer"),
        ([OLD, RTX], TWO, {}, "2 needed, 1 of the 2 here usable: NVIDIA GeForce GT 1030 has compute"
         " capability 6.1: bfloat16 needs 8.0 or newer"),
        ([H100.replace("Disabled", "Enabled")], ONE, {},
         "GPU 0 (NVIDIA H100 80GB HBM3) is split by MIG: whole GPUs are needed"),
        ([in_use(RTX, 0, 20000)], ONE, {}, "GPU 0 (NVIDIA GeForce RTX 4090) is"
         " in use: 21.0 GB of its 25.8 GB are taken (nvidia-smi says by whom)"),
        ([RTX], replace(ONE, model_bytes=15 * 10**9), {}, "the model's weights take"
         " 30.0 GB on a GPU, once to serve and once to train; NVIDIA GeForce RTX 4090 has 25.8 GB"),
    ],
)  # fmt: skip
def test_why_a_run_cannot_have_them_is_said(
    driver: Driver, listed: list[str], needs: Needs, environ: dict[str, str], why: str
) -> None:
    driver.lists(*listed)
    with pytest.raises(PreflightError) as refused:
        local_gpus.choose(needs, environ)
    assert refused.value.message == f"--gpus {needs.gpus}: not with this computer's GPUs"
    assert refused.value.why == why


def test_the_build_for_cuda_is_for_one_processor(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.lists(RTX)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(PreflightError) as refused:
        local_gpus.choose(ONE, {})
    assert refused.value.why == "the runtime's CUDA build needs an x86-64 processor, this is aarch64"


# ------------------------------------------------------------------ what is typed


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path / "project", tmp_path / "home")


def without_a_driver() -> str:
    """This PATH, less the folders that have a real nvidia-smi."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not (Path(folder) / "nvidia-smi").exists())


def test_without_a_gpu_it_is_3_before_anything_is_there(typed: Typed) -> None:
    done = typed("--gpus", "local", "--", "true", PATH=without_a_driver())
    assert done.returncode == 3 and not typed.home.exists()
    assert done.stderr.splitlines() == [
        "Error: --gpus local:1: not with this computer's GPUs",
        "  there is no NVIDIA driver: nvidia-smi is not installed",
        "Hint: launch plan --gpus H100:1 -- true"
        "  # what renting costs; without --gpus a run stays on the CPU",
    ]


def test_fewer_than_asked_for_are_offered(typed: Typed, driver: Driver) -> None:
    driver.lists(RTX)
    done = typed("--gpus", "local:2", "--", "true")
    assert done.returncode == 3
    assert done.stderr.splitlines()[2] == "Hint: run the same command with --gpus local:1"


def test_a_plan_costs_nothing_and_says_what_a_run_would_lack(typed: Typed, driver: Driver) -> None:
    driver.lists(*[RTX] * 4)
    done = typed("plan", "--gpus", "local:4", "--max", "1h")
    assert done.returncode == 0 and done.stderr == ""
    first, gpus, memory, step, *table = done.stdout.splitlines()
    what = "tiny on 4 GPUs of this computer, $0.00/h, deadline 1h; nothing is rented"
    assert first == f"Fits: {what}. Nothing to change."
    assert step == "  a step  not known before a run of tiny here"
    assert gpus == "  GPUs    3 for inference, 1 for training"
    assert memory.startswith("  memory  training takes ") and memory.endswith(" a GPU, of 23.1 GiB: fits")
    assert any(line.startswith("  GeForce RTX 4090 has 24.0 GiB, ") for line in table), "as its driver says"
    driver.lists(RTX)
    done = typed("plan", "--gpus", "local:2", "--json")
    assert done.returncode == 0
    assert done.stderr == "a run would be refused here: 2 needed, 1 here\n"
    said = json.loads(done.stdout)
    assert said["verdict"]["refused"] == "no GPU of this computer will do"
    assert said["cost_at_most"] == 0.0 and said["rented"] is None
    assert said["own"]["gpus"] == "local:2" and said["own"]["dtype"] == "bfloat16"


# ------------------------------------------------------------------ what is started


@pytest.fixture
def cuda_environment(typed: Typed, tmp_path: Path) -> Callable[[], dict[str, str]]:
    """A cuda environment that counts as built; its Python writes down what it was started with, and ends."""
    home = Home.find({"LAUNCH_HOME": str(typed.home)})
    built = bootstrap.Environment(home.environments.absolute(), "cuda")
    built.python.parent.mkdir(parents=True)
    told = tmp_path / "told"
    built.python.write_text(f'#!/bin/sh\nenv > {told}\necho "ARGUMENTS=$*" >> {told}\nexit 3\n')
    built.python.chmod(0o755)
    (built.folder / bootstrap.MARKER).write_text("{}")
    return lambda: dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)


def launch(typed: Typed, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAMS / "unit" / "launch_with_memory.py", *words],
        cwd=typed.folder,
        env={**os.environ, "LAUNCH_HOME": str(typed.home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_model_too_large_for_them_is_refused_with_what_would_do(typed: Typed, driver: Driver) -> None:
    driver.lists(RTX, RTX)
    done = typed("plan", "--gpus", "local:2", "--model", "Qwen/Qwen3-14B", HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    what, why, hint = done.stderr.splitlines()[-3:]
    assert what == "Error: Qwen/Qwen3-14B does not fit local:2" and "GiB" in why
    assert hint.startswith("Hint: launch plan --model Qwen/Qwen3-14B --gpus ")


@pytest.mark.parametrize(
    ("gpus", "split"),
    [
        ("local:1", {"engines": 1, "train_processes": 1, "shared": True}),
        ("local:3", {"engines": 2, "train_processes": 1, "shared": False}),
    ],
)
def test_the_runtime_is_started_for_cuda_on_the_chosen_gpus(
    typed: Typed, driver: Driver, cuda_environment: Callable[[], dict[str, str]], gpus: str, split: dict
) -> None:
    driver.lists(in_use(RTX, 0, 20000), *[RTX] * 3)
    done = launch(typed, "--gpus", gpus, "--", "true")
    assert "the runtime" in done.stderr, done.stderr
    record = RecordStore(Home.find({"LAUNCH_HOME": str(typed.home)})).list()[0]
    told = cuda_environment()
    count = int(gpus[-1])
    assert told["CUDA_VISIBLE_DEVICES"] == ",".join(uuid(1 + index) for index in range(count))
    assert told["ARGUMENTS"].startswith("-P -m runtime.keeper --config ")
    config = json.loads(Path(told["ARGUMENTS"].split()[-1]).read_text())
    assert config["device"] == "cuda" and config["dtype"] == "bfloat16"
    assert (config["engines"], config["train_processes"]) == (split["engines"], split["train_processes"])
    assert (config["engine"]["memory_fraction"] is not None) == split["shared"]
    assert record.state == "verified" and record.machine["variant"] == "cuda"
    assert "of this computer, $0.00/h" in done.stderr + done.stdout
