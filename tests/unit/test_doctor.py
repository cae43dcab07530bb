"""`launch doctor`: each question answers within its bound, with a fix to paste, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.backends import environments
from launcher.backends.skypilot.orphaned_machines import OrphanReport
from launcher.base import disk
from launcher.base.home import Home
from launcher.cli import doctor
from launcher.cli.doctor import Check, run_checks
from launcher.config import preflight, remote_tools
from launcher.records.records import RecordStore
from launcher.teardown import leftovers
from runtime import bootstrap
from tests.support.environment import PROGRAMS
from tests.support.played_driver import A100_40, H100, Driver
from tests.support.typed import Typed

pytestmark = pytest.mark.process

NAMES = [
    "python", "platform", "compiler", "uv", "memory", "folders", "disk", "port", "gpus", "environment",
    "network", "model", "settings", "accounts", "left over", "skypilot", "clouds",
]  # fmt: skip


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    monkeypatch.setattr(environments, "why_unreachable", lambda **options: None)
    monkeypatch.setattr(leftovers, "socket_parents", list)
    for name in ("HF_TOKEN", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture
def home(typed: Typed) -> Home:
    return Home.find({"LAUNCH_HOME": str(typed.home)})


@pytest.fixture
def answer(typed: Typed, home: Home, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Check]:
    """The answer to one question."""
    monkeypatch.chdir(typed.folder)
    for name in ("LAUNCH_HOME", "LAUNCH_LEASE"):
        monkeypatch.delenv(name, raising=False)
    return lambda name: next(check for check in run_checks(home, None, 30.0) if check.name == name)


def build(home: Home, leave_out: str = "") -> Path:
    """An environment that looks built: each pinned package has its folder, but for one."""
    environment = bootstrap.Environment(home.environments, "cpu")
    packages = environment.folder / "lib" / "python3" / "site-packages"
    for line in environment.lock_file("cpu").read_text().splitlines():
        name, _, version = line.partition("==")
        if name != leave_out and ";" not in line:
            info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").touch()
    environment.python.parent.mkdir()
    environment.python.symlink_to(sys.executable)
    (environment.folder / bootstrap.MARKER).write_text("{}")
    return environment.folder


def test_a_computer_that_can_run_is_0_and_nothing_was_changed(typed: Typed) -> None:
    done = typed("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "a run on this computer can work"
    assert not typed.home.exists()
    found = json.loads(typed("doctor", "--json").stdout)
    assert set(found) == {"schema", "ready", "ready_rented", "checks"} and found["ready"] is True
    assert [check["name"] for check in found["checks"]] == NAMES
    assert all(set(check) == {"name", "state", "detail", "fix"} for check in found["checks"])
    assert {check["state"] for check in found["checks"]} <= {"ok", "warn", "info"}


def test_a_computer_that_cannot_is_3_and_each_failure_has_its_fix(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 10**9)
    monkeypatch.setattr(environments, "why_unreachable", lambda **options: "Failed to fetch: the index")
    done = typed("doctor")
    assert done.returncode == 3
    assert done.stderr == "", "the table is the answer"
    lines = done.stdout.splitlines()
    assert lines[-1] == "a run on this computer cannot work yet"
    failed = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert [lines[index].split()[1] for index in failed] == ["disk", "network"]
    assert all(lines[index + 1].strip().startswith("fix: ") for index in failed)


def test_g31_there_are_two_verdicts_and_on_a_mac_the_rented_one_decides(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "KUBECONFIG"))]:
        monkeypatch.delenv(name)
    rented, here = typed("doctor").stdout.splitlines()[-2:]
    assert rented == "a run on rented machines cannot work yet: no account with any cloud"
    assert here == "a run on this computer can work"
    monkeypatch.setattr(preflight.sys, "platform", "darwin")
    done = typed("doctor")
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "a run on this computer cannot work: it needs Linux"
    (tmp_path / ".aws").mkdir()
    done = typed("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "a run on rented machines can work", "a run on this computer cannot work: it needs Linux",
    ]  # fmt: skip
    found = json.loads(typed("doctor", "--json").stdout)
    assert (found["ready"], found["ready_rented"]) == (False, True)
    monkeypatch.setattr(remote_tools, "missing_tools", lambda *tools: ["rsync"])
    done = typed("doctor")
    assert done.returncode == 3
    assert "rented machines cannot work yet: rsync is not installed" in done.stdout
    assert "fix: brew install rsync" in done.stdout


def test_a_complete_environment_is_told_from_one_with_a_hole(
    answer: Callable[[str], Check], home: Home
) -> None:
    assert answer("environment").state == "info"
    folder = build(home)
    assert answer("environment") == Check("environment", "ok", f"complete, in {folder}")
    shutil.rmtree(folder)
    build(home, leave_out="torch")
    check = answer("environment")
    assert (check.state, check.fix) == ("fail", f"rm -r {folder}  # the next run builds it")
    assert "1 packages are missing: torch==" in check.detail


def test_without_network_a_built_environment_is_enough(
    answer: Callable[[str], Check], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "why_unreachable", lambda **options: "Failed to fetch")
    assert answer("network").state == "fail"
    monkeypatch.setattr(environments, "why_unreachable", lambda **options: f"{environments.NO_ANSWER} in 2 s")
    assert answer("network").state == "warn", "perhaps it is only slow"
    build(home)
    assert answer("network").state == "info"


def test_what_is_wrong_with_the_users_own_files_is_said(answer: Callable[[str], Check], typed: Typed) -> None:
    assert answer("settings").state == "ok"
    (typed.folder / ".env").write_text("WANDB_API_KEY=0123456789abcdef\n")
    (typed.folder / ".env").chmod(0o644)
    check = answer("settings")
    assert (check.state, check.fix) == ("warn", f"chmod 600 {typed.folder}/.env")
    assert "Weights & Biases: known" in answer("accounts").detail
    assert "0123456789abcdef" not in repr(run_checks(Home.find({"LAUNCH_HOME": str(typed.home)}), None))
    (typed.folder / "launch.toml").write_text("lerning_rate = 1")
    check = answer("settings")
    assert check.state == "fail" and "lerning_rate" in check.detail and check.fix


def test_the_clouds_with_an_account_are_named_and_whose_prices_are_missing(
    answer: Callable[[str], Check], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [
        name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "KUBECONFIG"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/etc/ssl/certs.pem")
    assert answer("clouds").detail.startswith("no cloud account")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "key.json")
    (tmp_path / ".aws").mkdir()
    prices = tmp_path / ".sky" / "catalogs" / "v8" / "aws" / "vms.csv"
    prices.parent.mkdir(parents=True)
    prices.touch()
    assert answer("clouds").detail == ("credentials for aws, gcp; prices of gcp are not on this computer")


def test_a_taken_port_says_who_holds_it_and_is_no_failure(
    answer: Callable[[str], Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("launcher.records.endpoint.DEFAULT_PORT", taken.getsockname()[1])
        check = answer("port")
    assert check.state == "info"
    assert "(pid " in check.detail and "takes the next free one" in check.detail


def test_what_is_left_of_runs_is_a_warning_with_its_command(
    answer: Callable[[str], Check], home: Home
) -> None:
    assert answer("left over").state == "ok"
    store = RecordStore(home)
    store.update(store.create(name="dev").id, launch=None)
    check = answer("left over")
    assert (check.state, check.fix) == ("warn", "launch gc")
    assert "run dev" in check.detail


def test_g23_a_question_that_hangs_costs_its_bound_and_not_the_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(doctor, "_compiler", over.wait)
    begun = time.monotonic()
    checks = {check.name: check for check in run_checks(home, None, bound_seconds=0.2)}
    over.set()
    assert time.monotonic() - begun < 60
    assert checks["compiler"] == Check("compiler", "warn", "no answer in 0.2 s")
    assert checks["python"].state == "ok"


def test_a_question_that_breaks_is_an_answer(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_compiler", lambda: 1 // 0)
    check = next(check for check in run_checks(home, None) if check.name == "compiler")
    assert check.state == "warn" and "ZeroDivisionError" in check.detail


def test_g26_doctor_works_offline_and_imports_nothing_heavy(tmp_path: Path) -> None:
    """No network at all: an index that refuses, and no other socket is opened."""
    program = PROGRAMS / "unit" / "unwanted_imports.py"
    heavy = "sky,torch,vllm,dspy,aiohttp,httpx,litellm,openai"
    done = subprocess.run(
        [sys.executable, program, heavy, "launch", "doctor"],
        capture_output=True,
        text=True,
        env={
            "LAUNCH_HOME": str(tmp_path),
            "PATH": "",
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(tmp_path / "uv"),
        },
    )
    assert done.returncode == 0, done.stderr
    assert "network" in done.stdout


def test_gpus_of_this_computer_are_counted_and_none_are_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._gpus() == Check(
        "gpus", "info", "there is no NVIDIA driver: nvidia-smi is not installed; needed only for --gpus local"
    )
    driver = Driver(tmp_path)
    driver.lists(H100, A100_40, H100)
    assert doctor._gpus().state == "ok"
    assert doctor._gpus().detail == (
        "2×NVIDIA H100 80GB HBM3, 1×NVIDIA A100-SXM4-40GB will do: launch --gpus local:3"
    )
    driver.lists(H100.replace("580.95.05", "550.54"))
    assert doctor._gpus().detail.startswith("driver 550.54 is too old for CUDA 13.0: it needs 580 or newer;")


def test_p14_a_cloud_that_cannot_be_asked_is_no_cloud_that_refuses() -> None:
    report = OrphanReport(
        (), {"azure": "it lists only machines", "aws": "RequestExpired"}, unlisted=frozenset({"azure"})
    )
    assert doctor._answer_of("azure", report).state == "info"
    taken = doctor._answer_of("aws", OrphanReport((), {}, ("AWS us-east-1",), {"AWS eu-west-1": "denied"}))
    assert (taken.state, taken.detail) == (
        "ok", "it lets you in: AWS us-east-1; a policy denies AWS eu-west-1",
    )  # fmt: skip
    refused = doctor._answer_of("aws", report)
    assert (refused.state, refused.detail) == ("warn", "it does not answer: RequestExpired")
    assert "no cloud lets you in" in doctor._missing_for_rental([refused])
    assert "no cloud lets you in" not in doctor._missing_for_rental(
        [refused, doctor._answer_of("azure", report)]
    )
