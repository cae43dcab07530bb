"""Rules about the tree itself: who may import what, types, style, and what must never be committed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.import_graph import ImportGraph, circles
from tests.support.imports import Imports

ROOT = Path(__file__).resolve().parents[2]
GRAPH = ImportGraph(ROOT)
TOP_LEVEL = {
    "launcher", "runtime", "sky", "examples", "tests", ".env.example", "pyproject.toml", "README.md",
    ".ci", ".gitignore", "LICENSE",
}  # fmt: skip

# Each external world has one importer, a file, a few beside each other or a folder: an upgrade is one place.
IMPORTERS = {
    "sky": {
        f"launcher/backends/skypilot/sky_{part}.py"
        for part in (
            "aws_permissions", "calls", "identity", "machines_by_name", "prices", "providers", "server"
        )
    },
    "vllm": {
        f"runtime/engine/{part}.py"
        for part in (
            "server", "worker", "norms", "one_token_prefills", "http_speedups", "last_turn_parsing",
        )
    },
    "torchtune": {"runtime/trainer/network.py", "runtime/recipes/"},
    "trackio": {"launcher/results/trackio_log.py"},
    "xgrammar": {"runtime/trainer/grammar_masks.py"},
    "smolagents": {"examples/tiny_agent/smolagents_prompts.py"},
    "transformers": {
        "runtime/trainer/network.py", "runtime/engine/server.py",
        "examples/tiny_model/", "examples/tiny_agent/make.py", "examples/tiny_agent/start.py",
    },
    "dspy": {
        "launcher/client/dspy/", "launcher/client/arbor/", "examples/",
        "launcher/bench/programs/slipway_program.py",
    },
}  # fmt: skip

# The floors of both halves, from the ground up: a file imports only its own floor's and those named before. A
# floor is a folder, or a file of one that stands higher than the folder.
FLOORS = {
    "launcher": (
        "launcher/base", "launcher/console", "launcher/types", "launcher/records", "launcher/models",
        "launcher/results", "launcher/backends/ssh", "launcher/backends/skypilot", "launcher/backends",
        "launcher/teardown", "launcher/config", "launcher/dashboard", "launcher/proxy", "launcher/run",
        "launcher/bench", "launcher/cli",
    ),
    # A program imports these; of the rest they know the errors, and what is harmless on a terminal.
    "client": (
        "launcher/base", "launcher/client", "launcher/client/tracing", "launcher/client/trajectories",
        "launcher/client/session.py", "launcher/client/started_run.py", "launcher/client/ruler",
        "launcher/client/autorl", "launcher/client/dspy", "launcher/client/arbor", "launcher/client/art",
        "launcher/bench/programs",
    ),
    "runtime": (
        "runtime/shared", "runtime/shared/memory", "runtime/shared/train_kwargs", "runtime/engine",
        "runtime/gateway/http", "runtime/gateway/requests", "runtime/gateway/samples",
        "runtime/gateway/engines", "runtime/gateway/versions", "runtime/gateway/steps",
        "runtime/gateway/fine_tuning",
        "runtime/gateway/completions", "runtime/gateway/dialects",
        "runtime/gateway", "runtime/trainer", "runtime/recipes", "runtime",
    ),
    "tiny": ("runtime/tiny",),
}  # fmt: skip
LONGEST_FILE = 500
MOST_PUBLIC_NAMES = 12
# Made from the runtime's (`tests/generate.py`).
CLIENT_SCHEMA = "launcher/client/request_bodies.py"
# What breaks a rule until it is replaced. An entry that is not needed fails.
TWICE_FOR_NOW: dict[str, set[str]] = {
    "launcher": set(),
    "runtime": set(),
}
MOST_FILES_IN_LAUNCHER = 5


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> set[str]:
    """Top-level names a file imports, wherever in the file the import stands."""
    names: set[str] = set()
    for node in ast.walk(_parsed(path)):
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


@pytest.mark.process
@pytest.mark.parametrize("world", sorted(IMPORTERS))
def test_each_external_world_has_its_importer(world: str) -> None:
    found = [str(path.relative_to(ROOT)) for path in _sources() if world in _imports(path)]
    assert not [path for path in found if not path.startswith(tuple(IMPORTERS[world]))]


@pytest.mark.process
def test_tests_in_the_runtimes_python_import_no_dspy() -> None:
    """That Python has none: such a test cannot be collected. Also through what they import of `tests`."""
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "runtime").glob("*.py")}
    needs_dspy = re.compile(r"^(from|import) launcher\.client\.(dspy|arbor)", re.MULTILINE)
    files = Imports(ROOT).closure(own, "tests")
    assert not [name for name in sorted(files) if needs_dspy.search((ROOT / name).read_text())]


def _house() -> list[Path]:
    """The product's own files in their rooms."""
    return [path for path in _sources() if path.relative_to(ROOT).parts[0] in ("launcher", "runtime")]


def _imported_files(path: Path, passed: frozenset[str] = frozenset()) -> set[str]:
    """The modules that a file imports. A package is the door of its room: what it imports counts instead."""
    found: set[str] = set()
    for name in GRAPH.imported(path) - passed:
        door = ROOT / name.replace(".", "/") / "__init__.py"
        found |= _imported_files(door, passed | {name}) if door.is_file() else {name}
    return found


def _floor(module: Path) -> str:
    """A file's own floor, or its folder's."""
    name = str(module.relative_to(ROOT))
    is_own = any(name in floors for floors in FLOORS.values())
    return name if is_own else str(module.parent.relative_to(ROOT))


def _rooms() -> list[Path]:
    """The files that stand on a floor: all but the doors, which import out of their rooms."""
    return [path for path in _house() if path.stem != "__init__"]


@pytest.mark.process
@pytest.mark.parametrize("half", sorted(FLOORS))
def test_a_folder_imports_only_those_below_it(half: str) -> None:
    floors = FLOORS[half]
    upwards = []
    for path in _rooms():
        own = _floor(path)
        if own not in floors or (half == "client" and own == "launcher/base"):
            continue
        below = set(floors[: floors.index(own) + 1])
        for name in _imported_files(path):
            other = _floor(ROOT / f"{name.replace('.', '/')}.py")
            if other.split("/")[0] == own.split("/")[0] and other not in below:
                upwards.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not upwards


def test_no_file_is_imported_by_what_it_imports() -> None:
    """Also inside a room, through a package, by a name in a string, and for a type checker alone."""
    found = circles({GRAPH.name_of(path): GRAPH.imported(path) for path in _house()})
    assert not found, "\n".join(f"these import each other: {', '.join(circle)}" for circle in found)


def test_every_room_has_its_floor() -> None:
    assert {_floor(path) for path in _rooms()} == {room for floors in FLOORS.values() for room in floors}


def test_the_launchers_folder_is_a_floor_plan() -> None:
    directly = [path for path in _tracked() if path.parent == ROOT / "launcher"]
    assert len(directly) <= MOST_FILES_IN_LAUNCHER


def test_no_file_is_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {length}" for path in _house() if (length := _lines(path)) > LONGEST_FILE
    ]
    assert not long


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_file_has_too_many_public_names() -> None:
    """Classes and functions of the module, without underscore: whoever uses the file has to know these.

    Constants do not count: they are data, and a table of them (headers, a command's options) is one thing.
    Nor does `__all__`: who hands on what others define, as an `__init__` does, defines nothing.
    """
    many = {str(path.relative_to(ROOT)) for path in _house() if len(_public_names(path)) > MOST_PUBLIC_NAMES}
    assert not many


@pytest.mark.parametrize("half", sorted(TWICE_FOR_NOW))
def test_a_class_name_means_one_thing_in_a_half(half: str) -> None:
    """Of the classes of modules; one with an underscore means something in its own file alone."""
    files = [path for path in _house() if path.relative_to(ROOT).parts[0] == half]
    names = Counter(
        node.name
        for path in files
        if path != ROOT / CLIENT_SCHEMA
        for node in _parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == TWICE_FOR_NOW[half]


def _public_names(path: Path) -> set[str]:
    defining = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = [node.name for node in _parsed(path).body if isinstance(node, defining)]
    return {name for name in defined if not name.startswith("_")}


@pytest.mark.process
def test_the_two_halves_share_only_the_light_modules() -> None:
    shared = {"runtime.shared.schema", "runtime.shared.train_config", "runtime.shared.manifest"}
    shared |= {
        "runtime.bootstrap",
        "runtime.shared.failpoints",
        "runtime.fitness",
        "runtime.shared.redaction",
        "runtime.shared.rollout_files",
    }
    shared |= {
        "runtime.shared.peft_format",
        "runtime.shared.start_adapter_layout",
        "runtime.shared.architectures",
        "runtime.shared.language_model",
        "runtime.shared.anthropic_errors",
        "runtime.shared.event_streams",
    }
    shared |= {"runtime.shared.runtime_config", "runtime.shared.statuses", "runtime.shared.imports"}
    shared |= {"runtime.shared.model_shape", "runtime.shared.gpu_memory", "runtime.shared.open_files"}
    shared |= {"runtime.shared.log_errors", "runtime.shared.wandb_signals", "runtime.nvidia_smi"}
    shared |= {"runtime.shared.tracker_rows", "runtime.shared.validations"}
    shared |= {f"runtime.shared.memory.{part}" for part in ("planning", "suggestions", "memory_item")}
    for path in _sources():
        half = path.relative_to(ROOT).parts[0]
        for node in ast.walk(_parsed(path)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            other = node.module.split(".")[0]
            if half == "runtime":
                assert other != "launcher", path
            if half == "launcher" and other == "runtime":
                modules = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                assert modules & shared, (path, node.module)


def test_s06_only_one_place_of_the_launcher_starts_modules_of_ours() -> None:
    """So that none of them is started with the user's folder on its path; one of the others reads command
    lines, one prints a line to paste."""
    found = {path.name for path in (ROOT / "launcher").rglob("*.py") if '"-m"' in path.read_text()}
    assert found == {"module_command.py", "cpu_seconds.py", "program_check.py"}


def test_the_client_imports_nothing_outside_launcher() -> None:
    """A user's program imports it beside files of any name: `runtime.py` is a common one."""
    for path in [path for path in _sources() if path.is_relative_to(ROOT / "launcher" / "client")]:
        own = (
            "launcher.base.embedded_models",
            "launcher.base.errors",
            "launcher.base.layout",
            "launcher.base.sanitize",
            "launcher.base.module_command",
            "launcher.base.secret_words",
            "launcher.client",
        )
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in {"runtime", "sky", "examples", "tests"}, path
                is_launcher = node.module.split(".")[0] == "launcher"
                assert not is_launcher or node.module.startswith(own), (path, node.module)
            elif isinstance(node, ast.Import):
                assert not {it.name.split(".")[0] for it in node.names} & {"runtime", "launcher"}, path


@pytest.mark.process
def test_ruff_is_clean() -> None:
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_types_are_clean() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyrefly", "check"], cwd=ROOT, capture_output=True, text=True
    )
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


def test_no_merge_was_left_half_done() -> None:
    """A file that git could not merge says so in lines of its own."""
    marker = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.M)
    text = {".py", ".md", ".toml", ".yaml", ".js", ".css", ".html", ".txt"}
    assert not [
        str(path) for path in _tracked() if path.suffix in text and marker.search(path.read_text("utf-8"))
    ]
