"""The help: what it says, that it is light, and that it is the same on every terminal."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.commands import app
from launcher.cli.main import main
from launcher.cli.usage_errors import VERBS
from tests.support.environment import PROGRAMS

pytestmark = pytest.mark.process

HEAVY = ("sky", "torch", "vllm", "dspy", "aiohttp", "httpx", "litellm", "openai")
# Each of these is a large part of the 0.4 s that help may take.
NOT_FOR_HELP = (
    "rich",
    "psutil",
    "asyncio",
    "platformdirs",
    "urllib.request",
    "dotenv",
    "runtime.shared.schema",
)


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--help"], (*HEAVY, *NOT_FOR_HELP, "pydantic")),
        (["status", "--help"], HEAVY + NOT_FOR_HELP),
        (["--version"], HEAVY + NOT_FOR_HELP),
        (["plan", "--help"], HEAVY + NOT_FOR_HELP),
        (["plan"], (*HEAVY, "rich")),
        (["status"], (*HEAVY, "rich", "runtime.shared.schema")),
        (["gc"], (*HEAVY, "rich", "runtime.shared.schema")),
    ],
)
def test_g26_help_and_status_import_nothing_heavy(
    words: list[str], absent: tuple[str, ...], tmp_path: Path
) -> None:
    program = PROGRAMS / "unit" / "unwanted_imports.py"
    done = subprocess.run(
        [sys.executable, program, ",".join(absent), "launch", *words],
        capture_output=True,
        text=True,
        env={"LAUNCH_HOME": str(tmp_path), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr


def test_help_leads_with_three_examples_and_groups_the_options() -> None:
    text = _help("--help")
    examples = text.split("\n\n")[2].splitlines()
    assert len(examples) == 3
    assert all("launch " in line for line in examples)
    groups = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["What to run", "Money", "Lifetime", "Output", "Other", "Verbs"]


def test_every_verb_is_in_the_help_and_has_its_own() -> None:
    text = _help("--help")
    assert (
        tuple(command.callback.__name__ for command in app.registered_commands if command.callback) == VERBS
    )
    for verb in VERBS:
        assert f"\n  {verb} " in text
        assert _help(f"{verb} --help").startswith(f"Usage: launch {verb}")


def test_n08_launch_alone_prints_the_help_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.run.launching.launch_run", lambda *given: pytest.fail("a run was started"))
    assert _help("") == _help("--help")


def test_n08_an_endpoint_without_a_program_is_the_same_run_with_up_and_with_any_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("launcher.run.launching.launch_run", lambda *given: started.append(given[:4]))
    words = "--name dev --set train.seed=3 --lease 5m"
    for line in (words, f"up {words}", f"--name dev up {words.removeprefix('--name dev ')}", "up --plain"):
        assert main(shlex.split(line)) == 0
    plain, *same, alone = started
    assert same == [plain] * 2 and plain[0]["lease"] == "5m"
    assert not any(alone[0].values()) and not any(alone[1:])
    assert main(["--version", "up"]) == 0 and len(started) == 4


def test_help_is_the_same_on_every_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    here = _help("--help")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert _help("--help") == here
    assert max(len(line) for line in here.splitlines()) <= 100


def _help(words: str) -> str:
    """What `launch WORDS` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(shlex.split(words))
    return out.getvalue().strip("\n")
