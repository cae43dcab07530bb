"""`launch --arbor`: how it is asked for, its port, its record, and the `arbor` that the program imports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.config import import_shadowing, ports, resume_source
from launcher.config.setting_sources import load
from launcher.proxy.relay import Relay
from launcher.records.endpoint import ARBOR_PATH, DEFAULT_PORT, LocalEndpoint, save_token, wanted_port
from launcher.records.records import RecordStore
from launcher.types.settings import Settings
from tests.support import canaries
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.launched import Launched
from tests.support.ports import free_port
from tests.support.typed import Typed

pytestmark = pytest.mark.process

TOKEN = "the-token-of-this-very-run"
CANARY = "sk-real-" + "c4n4ry" * 5
KEYS = ("arbor", "not-needed", CANARY)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", tmp_path / "config", tmp_path / "cache")


@pytest.fixture
def settings(home: Home, tmp_path: Path) -> Callable[..., Settings]:
    def load_here(environ: dict[str, str] | None = None, **flags: Any) -> Settings:
        return load(flags, environ=environ or {}, folder=tmp_path, home=home)

    return load_here


# ------------------------------------------------------------------ the setting


def test_a02_arbor_is_a_setting_like_the_others(settings: Callable[..., Settings], tmp_path: Path) -> None:
    assert settings().arbor is False
    (tmp_path / "launch.toml").write_text("arbor = true\n")
    assert settings().values["arbor"].source == "launch.toml" and settings().arbor
    assert not settings({"LAUNCH_ARBOR": "no"}).arbor
    assert settings({"LAUNCH_ARBOR": "no"}, arbor=True).values["arbor"].source == "--arbor"


def test_a02_arbor_is_an_option_of_launch_and_config_shows_it(tmp_path: Path) -> None:
    launch = Typed(tmp_path / "project", tmp_path / "home")
    shown = json.loads(launch("--json", "config", "--arbor").stdout)
    assert shown["settings"]["arbor"] == {"value": True, "source": "--arbor"}
    done = launch("--arbor", "--name", "dev", "--", "no-such-program")
    assert done.returncode == 3 and "no such program" in done.stderr


def test_a02_a_resumed_run_keeps_it_and_one_of_before_has_it_not(
    settings: Callable[..., Settings], home: Home
) -> None:
    store = RecordStore(home)
    details = resume_source.record_details(settings(arbor=True), "/models/mine")
    record = store.create(name="dev", details=details)
    again = resume_source.merge_settings(settings(), record)
    assert again.arbor and wanted_port(again) == DEFAULT_PORT
    del details["settings"]["arbor"]
    assert not resume_source.merge_settings(settings(), store.create(name="old", details=details)).arbor


# ------------------------------------------------------------------ the port


def test_a02_the_port_is_arbors_unless_another_is_asked_for(settings: Callable[..., Settings]) -> None:
    assert DEFAULT_PORT == 7453
    assert wanted_port(settings(arbor=True)) == 7453
    assert wanted_port(settings(arbor=True, port="8123")) == 8123
    assert wanted_port(settings()) is None, "without --arbor any will do"


def test_a02_a_taken_port_is_refused_by_whose_it_is_and_with_what_the_program_must_say(
    tmp_path: Path, home: Home
) -> None:
    with socket.socket() as holder:
        port = free_port()
        holder.bind(("127.0.0.1", port))
        holder.listen()
        done = Typed(tmp_path / "project", tmp_path / "home")("--arbor", "--port", str(port), "--", "true")
        assert done.returncode == 3
        assert f"port {port} is taken" in done.stderr and f"(pid {os.getpid()}) uses it" in done.stderr
        remark = f"  # and {port + 1} in your program's addresses"
        other = f"--arbor --port {port + 1}"
        assert f"Hint: launch {other} -- true{remark}" in done.stderr
        with pytest.raises(PreflightError) as late:
            Relay(tmp_path / "none.sock", port, token=TOKEN, keyless_option="--arbor").start()
        assert late.value.hint == f"launch {other}{remark}"
        with pytest.raises(PreflightError, match="is taken") as plain:
            ports.check_port(port, home)
        assert "--arbor" not in str(plain.value.hint)


# ------------------------------------------------------------------ the program's path


def endpoint(tmp_path: Path, arbor: bool) -> LocalEndpoint:
    return LocalEndpoint("http://127.0.0.1:7453", TOKEN, "slip-1", tmp_path, 180.0, arbor=arbor)


def test_a02_our_folder_is_first_on_the_programs_path_and_the_users_stays_behind_it(tmp_path: Path) -> None:
    mine = f"/mine{os.pathsep}/yours"
    with_it = endpoint(tmp_path, arbor=True)
    assert with_it.environ({"PYTHONPATH": mine})["PYTHONPATH"] == f"{ARBOR_PATH}{os.pathsep}{mine}"
    assert with_it.environ({})["PYTHONPATH"] == str(ARBOR_PATH)
    assert with_it.environ({"PYTHONPATH": ""})["PYTHONPATH"] == str(ARBOR_PATH), "no empty entry: that is ."
    without = endpoint(tmp_path, arbor=False)
    assert without.environ({"PYTHONPATH": mine})["PYTHONPATH"] == mine
    assert "PYTHONPATH" not in without.environ({})


def test_a02_env_tells_another_terminal_the_same(home: Home, tmp_path: Path) -> None:
    store = RecordStore(home)
    record = store.create(name="dev")
    save_token(store.folder(record.id), TOKEN)
    store.update(record.id, state="work", url="http://127.0.0.1:7453", details={"arbor": True})
    printed = Typed(tmp_path / "project", home.data)("env", "dev").stdout
    for before in ({}, {"PYTHONPATH": "/mine"}):
        shell = subprocess.run(
            ["sh", "-c", f"{printed}\necho $PYTHONPATH"],
            env=before,
            capture_output=True,
            text=True,
            check=True,
        )
        assert shell.stdout.split() == [os.pathsep.join([str(ARBOR_PATH), *before.values()])]


@pytest.mark.parametrize("form", ["arbor.py", "arbor/__init__.py"])
def test_a02_a_users_own_arbor_beside_the_program_is_refused_under_arbor_alone(
    form: str, tmp_path: Path
) -> None:
    command = ["python", "my.py"]
    beside, behind = tmp_path / "beside", tmp_path / "behind"
    for folder in (beside, behind):
        (folder / form).parent.mkdir(parents=True)
        (folder / form).write_text("")
        (folder / "my.py").write_text("")
    import_shadowing.refuse(command, beside, {})
    with pytest.raises(PreflightError, match="hides the package arbor that comes with launch") as refused:
        import_shadowing.refuse(command, beside, {}, arbor=True)
    hidden = form.partition("/")[0]
    assert str(refused.value.hint).startswith(f"mv {beside}/{hidden} {beside}/my_{hidden}")
    (tmp_path / "my.py").write_text("")
    import_shadowing.refuse(command, tmp_path, {"PYTHONPATH": str(behind)}, arbor=True)
    import_shadowing.refuse(["python", "-m", "x"], ARBOR_PATH, {}, arbor=True)


def test_a02_nothing_of_ours_but_arbor_is_importable_by_that_folder() -> None:
    assert {path.name for path in ARBOR_PATH.iterdir()} - {"__pycache__"} == {"arbor"}


# ------------------------------------------------------------------ a whole run


def test_a02_the_program_imports_ours_though_the_real_one_is_there_and_its_keys_stay_nowhere(
    tmp_path: Path,
) -> None:
    real = tmp_path / "site" / "arbor"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("raise SystemExit('the real one')\n")
    home, result = tmp_path / "home", tmp_path / "found.json"
    home.mkdir()
    program = [sys.executable, str(PROGRAMS / "unit" / "use_arbor.py"), str(result)]
    program += [key.encode().hex() for key in KEYS]
    launched = Launched(
        home,
        ["--arbor", "--port", str(free_port()), "--", *program],
        executable=[sys.executable, "-m", "tests.support.small_launch"],
        environ={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(real.parent)])},
    )
    try:
        assert launched.wait(300) == 0, launched.stderr
    finally:
        launched.kill_tree()
    found = json.loads(result.read_text())
    assert found["arbor"] == str(ARBOR_PATH / "arbor" / "__init__.py")
    assert found["path"] == [str(ARBOR_PATH), str(REPOSITORY), str(real.parent)]
    assert found["answers"] == [200, 200, 200]
    said = launched.stdout + launched.stderr
    assert said.count(str(real / "__init__.py")) == 1, f"which one is not used is said once:\n{said}"
    assert "your programs that were written for Arbor run as they are" in said
    assert json.loads((launched.run_dir / "record.json").read_text())["details"]["arbor"] is True
    assert not canaries.in_files([home], [CANARY])
