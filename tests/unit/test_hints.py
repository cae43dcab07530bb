"""Hints: what looks like a command can be pasted whole, remark and all; what cannot does not look so."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from launcher.cli.invocation import Invocation
from launcher.cli.main import main, split
from launcher.cli.typed_line import TypedLine
from launcher.cli.usage_errors import VERBS
from tests.support import readme_commands
from tests.support.readmes import ROOT

_COMMANDS = {
    "launch", "sky", "apt-get", "brew", "pip", "uv", "wsl", "rm", "mv", "cp", "ls", "less", "head", "sed",
    "df", "cd", "chmod", "kill", "ps", "which", "file", "export", "unset", "env", "ssh", "docker", "eval",
}  # fmt: skip
_STAND_INS = {"verb": "status", "meant": "status", "option": "--name"}
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
# A remark in brackets behind a gap, which no shell takes.
_BRACKETS = re.compile(r"\S {2,}\(")
_OURS = sorted(path for half in ("launcher", "runtime") for path in (ROOT / half).rglob("*.py"))


def strings(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Each string of a file that is no docstring: where it is, its text with x for what is filled in, and
    whether it is an error's hint."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    hints = {id(part) for node in ast.walk(tree) for hint in _hints(node) for part in _choices(hint)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant) and not {id(node)} & (docs | inside):
            text = _text(node)
            if text is not None:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text, id(node) in hints


def _hints(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "hint" for name in node.targets):
        yield node.value
    if isinstance(node, ast.Call):
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        yield from (word.value for word in node.keywords if word.arg == "hint")
        if (called[:1].isupper() or called == "__init__") and called != "Check" and len(node.args) >= 3:
            yield node.args[2]


def _choices(hint: ast.expr) -> list[ast.expr]:
    if isinstance(hint, ast.IfExp):
        return [*_choices(hint.body), *_choices(hint.orelse)]
    if isinstance(hint, ast.BoolOp):
        return [one for value in hint.values for one in _choices(value)]
    return [hint]


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    assert isinstance(node, ast.JoinedStr)
    parts = [part.value if isinstance(part, ast.Constant) else _stand_in(part) for part in node.values]
    return "".join(str(part) for part in parts)


def _stand_in(part: ast.expr) -> str:
    filled = ast.unparse(part.value if isinstance(part, ast.FormattedValue) else part)
    return "launch plan --gpus x" if "plan_command(" in filled else _STAND_INS.get(filled, "x")


def is_command(text: str, *, hint: bool) -> bool:
    """Whether somebody would paste it. A message may begin with `launch`, and no verb follows."""
    words = text.split()
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if not words or words[0] not in _COMMANDS:
        return False
    if hint:
        return True
    return words[0] == "launch" and len(words) > 1 and (words[1] in VERBS or words[1].startswith("--"))


def fault(text: str) -> str | None:
    """Why it could not be pasted."""
    if "…" in text.partition("  # ")[0]:
        return "something is left out"
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    if checked.returncode != 0:
        return checked.stderr
    words = shlex.split(text, comments=True)
    if words[0] != "launch":
        return None
    own, program = split(words[1:])
    try:
        readme_commands.parsed(own, program)
    except typer.Exit:
        return None
    except typer.TyperException as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("launch plan --gpus H100:2  # or H200:1", True),
        ("launch plan --gpus H100:2   (or H200:1)", False),
        ("launch --gpus H100:4 --yes …", False),
        ("launch plan --gpuz H100:4", False),
        ("launch down RUN; if that fails: rm x", False),
    ],
)
def test_a_remark_behind_a_command_is_a_comment(text: str, right: bool) -> None:
    assert is_command(text, hint=True)
    assert (fault(text) is None) == right


# A line, a hint, the settings that it leaves out, and the hint as it is shown.
LINES = [
    ("--gpus H100 --model tinny -- python my.py", "launch --model tiny", "",
     "launch --gpus H100 --model tiny -- python my.py"),
    ("--set train.seed=2 --set train.lr=1 -- true", "launch --set train.learning_rate=1", "train.lr",
     "launch --set train.seed=2 --set train.learning_rate=1 -- true"),
    ("--set lease=4m --arbor -- true", "launch --lease 4m", "", "launch --arbor --lease 4m -- true"),
    ("--arbor --port=7453 -- a 'b c'", "launch --arbor --port 7454  # and in your program's text", "",
     "launch --arbor --port 7454 -- a 'b c'  # and in your program's text"),
    ("--resume dev --gpus H100 --max 2h", "launch --resume dev  # without --gpus and --infra", "gpus infra",
     "launch --max 2h --resume dev  # without --gpus and --infra"),
    ("--gpus H100 --from r@7 --model x -- true", "launch --from r@7", "model",
     "launch --gpus H100 --from r@7 -- true"),
    ("--budget 4 python my.py --steps 3", "launch -- python my.py --steps 3", "",
     "launch --budget 4 -- python my.py --steps 3"),
    ("--resume dev --max 2h up", "launch --resume dev", "up", "launch --max 2h --resume dev"),
    ("up --name dev --model tinny", "launch --model tiny", "", "launch up --name dev --model tiny"),
    ("up -- true", "launch -- true", "", "launch -- true"),
    ("plan --model tinny --refresh", "launch --model tiny", "", "launch plan --refresh --model tiny"),
    ("--dry-run --name dev up", "launch plan", "", "launch plan --name dev"),
    # A plan's command names settings and GPUs itself; the rest of the line stays.
    ("--gpus H100:4 --infra aws --train-gpus 2 --arbor -y -- true", "launch plan --gpus A100:1 --max 2h", "",
     "launch plan --arbor -y --gpus A100:1 --max 2h -- true"),
    # Another command, and what is none.
    ("--name dev -- true", "launch status dev", "", "launch status dev"),
    ("--max 4 -- true", "launch --help", "", "launch --help"),
    ("--gpus H100 -- true", "launch --resume slip-0123abcd", "", "launch --resume slip-0123abcd"),
    ("logs dev", "launch --resume dev", "", "launch --resume dev"),
    ("--model x -- true", "launch reaches it by ssh", "", "launch reaches it by ssh"),
    ("--model x -- true", "launch cannot read the user's file", "", "launch cannot read the user's file"),
    ("--json -- python -m launcher.client.holder", "launch --model tiny", "", "launch --model tiny"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "hint", "without", "shown"), LINES)
def test_n07_a_hint_is_the_line_that_was_typed_with_its_change(
    typed: str, hint: str, without: str, shown: str
) -> None:
    own, program = split(shlex.split(typed))
    line = TypedLine(tuple(own), None if program is None else tuple(program))
    assert line.complete(hint, without.split()) == shown


# A program, and how it is shown.
SECRETS = [
    ("python my.py --hf-token hf_x --lr 1", "python my.py --hf-token *** --lr 1"),
    ("python my.py --api-key=sk-1 -v", "python my.py --api-key=*** -v"),
    ("env OPENAI_API_KEY=sk-1 DB_PASSWORD=p my.py", "env OPENAI_API_KEY=*** DB_PASSWORD=*** my.py"),
    ("my.py judge.apiKey=1 --clientSecret 2", "my.py judge.apiKey=*** --clientSecret ***"),
    ("my.py --hf-token --lr 1", "my.py --hf-token --lr 1"),
    ("token.py train --max-tokens 512 max_tokens=9", "token.py train --max-tokens 512 max_tokens=9"),
    ("my.py --tokenizer gpt2 --seed=1", "my.py --tokenizer gpt2 --seed=1"),
]


@pytest.mark.parametrize(("program", "shown"), SECRETS)
def test_n07_a_secret_of_the_program_is_in_no_hint_and_not_in_the_line_that_it_is_told(
    program: str, shown: str
) -> None:
    line = TypedLine(("--model", "x"), tuple(program.split()))
    assert shlex.split(line.complete("launch --model tiny"))[4:] == shown.split()
    assert shlex.split(line.started_by() or "")[4:] == shown.split()


@pytest.mark.parametrize("text", ["import a\nimport b", "print('\x1b[2J')", "a\tb"])
def test_n07_a_hint_stays_alone_if_the_program_could_not_be_pasted_as_it_is_shown(text: str) -> None:
    line = TypedLine(("--gpus", "H100"), ("python", "-c", text))
    assert line.complete("launch --model tiny") == "launch --model tiny"
    assert shlex.split(line.started_by() or "") == ["launch", "--gpus", "H100", "--", "python", "-c", text]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--gpus H100 -- my.py 'a  # b'", "launch --gpus H100 -- my.py 'a  # b'"),
        ("--model tiny", None),
        ("--json -- python -m launcher.client.holder", None),
    ],
)
def test_s04_the_program_is_told_the_typed_line_with_each_of_its_options(
    typed: str, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    def invoke(own: list[str], invocation: Invocation) -> int:
        told.append(invocation.started_by)
        return 0

    monkeypatch.setattr("launcher.cli.commands.invoke", invoke)
    monkeypatch.setattr(sys, "argv", ["launch", *shlex.split(typed)])
    main()
    assert told == [line]


@pytest.mark.process
def test_every_hint_that_looks_like_a_command_can_be_pasted_whole() -> None:
    found = [
        (where, text) for path in _OURS for where, text, hint in strings(path) if is_command(text, hint=hint)
    ]
    assert len(found) > 100
    assert [(where, text, wrong) for where, text in found if (wrong := fault(text))] == []


@pytest.mark.process
def test_no_remark_in_brackets_stands_behind_a_command() -> None:
    found = [(where, text) for path in _OURS for where, text, _ in strings(path)]
    assert [one for one in found if _BRACKETS.search(one[1]) and is_command(one[1], hint=True)] == []
