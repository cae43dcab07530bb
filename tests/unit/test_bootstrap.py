"""runtime/bootstrap.py with the real uv and a wheel of our own: built once, whole or not at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.backends import environments
from runtime import bootstrap
from tests.support.environment import PROGRAMS

pytestmark = pytest.mark.process

REQUIREMENTS = bootstrap.REQUIREMENTS


def _wheel(folder: Path, name: str, version: str = "1.0") -> None:
    """A package of one module, as small as a wheel can be."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "def main():\n    pass\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-command = {name}:main\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two requirement sets, whose packages come from a folder of wheels and from nowhere else."""
    _wheel(tmp_path / "wheels", "slipway_one")
    _wheel(tmp_path / "wheels", "slipway_two")
    folder = tmp_path / "requirements"
    folder.mkdir()
    for variant, lines in {
        "tiny": "slipway_one==1.0",
        "more": "slipway_two==1.0",
        "broken": "slipway_no==9",
    }.items():
        (folder / f"{variant}.in").write_text(lines)
        (folder / f"{variant}.txt").write_text(lines)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def _build(root: Path, requirements: Path, variant: str = "tiny", **options: object) -> Path:
    return bootstrap.ensure_environment(root, variant, requirements=requirements, **options)  # type: ignore[arg-type]


def _imports(python: Path, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def test_an_environment_holds_what_is_pinned_and_its_scripts_work(tmp_path: Path, requirements: Path) -> None:
    said: list[str] = []
    python = _build(tmp_path / "root", requirements, progress=said.append)

    assert _imports(python, "slipway_one") and not _imports(python, "slipway_two")
    # It was built elsewhere and renamed: scripts must not point there.
    assert subprocess.run([python.parent / "slipway_one-command"], capture_output=True).returncode == 0
    assert any("Installed 1 package" in line for line in said)
    assert [path.name for path in (tmp_path / "root").iterdir() if "building" in path.name] == []


def test_a_built_environment_is_found_in_milliseconds(tmp_path: Path, requirements: Path) -> None:
    python = _build(tmp_path / "root", requirements)

    seconds = []
    for _ in range(10):
        begun = time.perf_counter()
        assert _build(tmp_path / "root", requirements) == python
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.05


def test_each_use_of_an_environment_is_remembered(tmp_path: Path, requirements: Path) -> None:
    folder = _build(tmp_path / "root", requirements).parents[1]
    os.utime(folder / bootstrap.MARKER, (0, 0))
    _build(tmp_path / "root", requirements)
    assert environments.last_used(folder) > time.time() - 60


def test_whether_it_could_be_built_is_asked_of_uv_as_it_is_configured(
    tmp_path: Path, requirements: Path
) -> None:
    assert environments.why_unreachable("tiny", requirements=requirements) is None
    assert "slipway-no" in str(environments.why_unreachable("broken", requirements=requirements))
    assert not (tmp_path / "root").exists()


def test_extras_are_installed_on_top_in_an_environment_of_their_own(
    tmp_path: Path, requirements: Path
) -> None:
    python = _build(tmp_path / "root", requirements, extras=("more",))

    assert _imports(python, "slipway_one") and _imports(python, "slipway_two")
    assert python != bootstrap.Environment(tmp_path / "root", "tiny", (), requirements).python


def test_another_content_is_another_environment(tmp_path: Path, requirements: Path) -> None:
    before = bootstrap.Environment(tmp_path, "tiny", (), requirements).name
    (requirements / "tiny.txt").write_text("slipway_one==1.0\nslipway_two==1.0\n")
    after = bootstrap.Environment(tmp_path, "tiny", (), requirements).name

    assert before != after and re.fullmatch(r"tiny-py3\.\d+-[0-9a-f]{12}", after)


def test_two_builders_at_once_build_once(tmp_path: Path, requirements: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        said: list[str] = []
        builds = [
            pool.submit(_build, tmp_path / "root", requirements, progress=said.append) for _ in range(2)
        ]
        pythons = {build.result(timeout=120) for build in builds}

    assert len(pythons) == 1 and _imports(pythons.pop(), "slipway_one")
    assert len([line for line in said if line.startswith("Installed")]) == 1
    assert any("waiting for it" in line for line in said)


@pytest.mark.parametrize("damage", ["environment.json", "bin/python"])
def test_a_broken_environment_is_built_again(tmp_path: Path, requirements: Path, damage: str) -> None:
    python = _build(tmp_path / "root", requirements)
    (python.parents[1] / damage).unlink()

    assert _build(tmp_path / "root", requirements) == python
    assert _imports(python, "slipway_one")


def test_a_killed_build_leaves_nothing_that_is_taken_for_an_environment(
    tmp_path: Path, requirements: Path
) -> None:
    root = tmp_path / "root"
    program = PROGRAMS / "unit" / "build_environment.py"
    builder = subprocess.Popen([sys.executable, program, root, requirements, "tiny"], stdout=subprocess.PIPE)
    assert builder.stdout is not None
    builder.stdout.readline()  # uv works
    builder.send_signal(signal.SIGKILL)
    builder.wait()

    # uv itself may still be at work on what nobody will use.
    assert _imports(_build(root, requirements), "slipway_one")


def test_a_failed_build_says_what_uv_said_and_leaves_nothing(tmp_path: Path, requirements: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError, match=r"slipway.no"):
        _build(tmp_path / "root", requirements, "broken")
    assert [path.name for path in (tmp_path / "root").iterdir() if not path.name.endswith(".lock")] == []


def test_an_unknown_set_is_refused_with_those_there_are(tmp_path: Path, requirements: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError, match=r"broken, more, tiny"):
        _build(tmp_path / "root", requirements, "cpu")


def test_uv_takes_no_settings_from_the_folder_it_is_called_in(
    tmp_path: Path, requirements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[tool.uv]\nno-build = true\n[tool.uv.pip]\nno-binary = [":all:"]\n'
    )
    monkeypatch.chdir(project)
    assert _imports(_build(tmp_path / "root", requirements), "slipway_one")


def test_folders_of_wheels_are_read_from_both_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"PIP_FIND_LINKS": "/a  wheels", "UV_FIND_LINKS": "/a,file:///b"}
    assert bootstrap.find_links(environ) == ["/a", str(tmp_path / "wheels"), "file:///b"]


def test_pytorchs_index_is_asked_only_where_no_folder_has_the_cpu_build(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.txt"
    lock.write_text("torch==2.13.0+cpu\nsix==1.17.0\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert not bootstrap.holds_cpu_torch([], lock)
    assert not bootstrap.holds_cpu_torch([str(wheels)], lock)
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert bootstrap.holds_cpu_torch([str(wheels)], lock)
    assert bootstrap.holds_cpu_torch([wheels.as_uri()], lock)
    lock.write_text("torch==2.13.0\n")
    assert bootstrap.holds_cpu_torch([], lock)


def test_the_command_prints_the_python(
    tmp_path: Path, requirements: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = bootstrap.Environment(tmp_path / "root", "cpu").python
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (python.parents[1] / "environment.json").write_text("{}")

    assert bootstrap.main(["--root", str(tmp_path / "root")]) == 0
    assert capsys.readouterr().out.strip() == str(python)


@pytest.mark.parametrize("name", ["cpu", "cuda", "test"])
def test_the_shipped_locks_pin_everything_and_name_no_place(name: str) -> None:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    assert lines and all(re.match(r"[a-z0-9-]+==[0-9][^ ]*( ; |$)", line) for line in lines)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_shipped_locks_hold_what_their_sources_ask_for(name: str) -> None:
    locked = {line.split("==")[0]: line for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines()}
    for line in (REQUIREMENTS / f"{name}.in").read_text().splitlines():
        if line and not line.startswith("#"):
            wanted = line.split("==")[0]
            assert wanted in locked and ("==" not in line or locked[wanted] == line)
