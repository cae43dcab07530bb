"""Rules about the tree itself: who may import what, types, style, and what must never be committed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "launcher", "runtime", "sky", "examples", "tests", ".env.example", "pyproject.toml", "README.md",
    ".ci", ".gitignore", "LICENSE",
}  # fmt: skip

# Each external world has one importer, a file, a few beside each other or a folder: an upgrade is one place.
IMPORTERS = {
    "sky": {f"launcher/machines/sky_{part}.py" for part in ("calls", "prices", "providers", "server")},
    "vllm": {"runtime/serving/engine.py", "runtime/serving/worker.py"},
    "torchtune": {"runtime/training/decoder.py", "runtime/recipes/"},
    "dspy": {"launcher/client/", "examples/"},
}  # fmt: skip


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def _imports(path: Path) -> set[str]:
    """Top-level names a file imports, wherever in the file the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def _sources() -> list[Path]:
    return [
        path for path in _tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"
    ]


def test_the_top_level_is_the_agreed_one() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in _tracked()} <= TOP_LEVEL


def test_no_python_file_stands_in_sky() -> None:
    assert not list((ROOT / "sky").rglob("*.py"))


@pytest.mark.parametrize("world", sorted(IMPORTERS))
def test_each_external_world_has_its_importer(world: str) -> None:
    found = [str(path.relative_to(ROOT)) for path in _sources() if world in _imports(path)]
    assert not [path for path in found if not path.startswith(tuple(IMPORTERS[world]))]


def test_the_two_halves_share_only_the_light_modules() -> None:
    shared = {"runtime.schema", "runtime.train_config", "runtime.training.manifest"}
    shared |= {"runtime.bootstrap", "runtime.failpoints", "runtime.fitness", "runtime.redaction"}
    shared |= {"runtime.training.peft_form", "runtime.training.start"}
    for path in _sources():
        half = path.relative_to(ROOT).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            other = node.module.split(".")[0]
            if half == "runtime":
                assert other != "launcher", path
            if half == "launcher" and other == "runtime":
                modules = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                assert modules & shared, (path, node.module)


def test_the_client_imports_nothing_outside_launcher() -> None:
    """A user's program imports it beside files of any name: `runtime.py` is a common one."""
    for path in [path for path in _sources() if path.is_relative_to(ROOT / "launcher" / "client")]:
        own = {"launcher.errors", "launcher.client"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in {"runtime", "sky", "examples", "tests"}, path
                is_launcher = node.module.split(".")[0] == "launcher"
                assert not is_launcher or ".".join(node.module.split(".")[:2]) in own, (path, node.module)
            elif isinstance(node, ast.Import):
                assert not {it.name.split(".")[0] for it in node.names} & {"runtime", "launcher"}, path


def test_ruff_is_clean() -> None:
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_types_are_clean() -> None:
    done = subprocess.run([sys.executable, "-m", "basedpyright"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_checkout_gets_the_version_of_each_package_that_this_tree_was_tested_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    asked += [one for extra in project["project"]["optional-dependencies"].values() for one in extra]
    pinned = {one.partition("==")[0] for one in project["tool"]["uv"]["constraint-dependencies"]}
    names = {re.split(r"[\[<>=]", one)[0] for one in asked if "==" not in one}
    assert names - pinned == {project["project"]["name"]}


def test_no_machine_path_or_registry_host_is_committed() -> None:
    forbidden = re.compile(
        r"https?://[^\s\"')]*(pypi\.|pythonhosted|download\.pytorch)|/root/|--(extra-)?index-url"
    )
    for path in _tracked():
        if path.suffix in {".safetensors", ".png"} or path == Path(__file__):
            continue
        found = forbidden.search(path.read_text(errors="replace"))
        assert not found, (path, found and found.group())
