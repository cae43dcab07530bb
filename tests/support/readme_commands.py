"""Whether the commands and programs that a README shows could be typed: each is judged without being run.

Neighbours: `readmes.py` finds the blocks. A command of `launch` is parsed by the real command line and its
settings are read by the real reader; of a Python program the file and its options must be there. A word
that is not known here is a fault: whoever shows a new kind of command says how it is judged. Knows nothing
of what a command prints.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import typer.main

from tests.support import foreign_environments
from tests.support.readmes import ROOT, Fence, fences

SHELLS = {"bash", "sh", "console"}
# Programs of the reader's own, for whom the text stands.
PLACEHOLDERS = {"optimize.py", "evaluate.py", "my.py", "script.py", "train.py", "PROGRAM", "nvidia-smi"}
# The Python of an environment of the reader's own.
_THEIR_PYTHON = re.compile(r"[A-Z_]+/bin/python")
_SEPARATORS = {"&&", "||", ";", "|"}
_SUBSHELL = re.compile(r"\$\((.*)\)")
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
# The extras of SkyPilot for one cloud, in the version that pyproject.toml names.
_SKYPILOT = re.compile(r"skypilot\[[a-z]+\]==(\S+)")
_INLINE = re.compile(r"`((?:uv run )?(?:launch|pytest) [^`]*)`")


def commands(readme: Path) -> list[tuple[str, str]]:
    """Each command line of a README with where it stands: of shell blocks, behind a `$ ` of any other."""
    found = []
    for fence in fences(readme):
        text = fence.text.replace("\\\n", " ")
        for line in text.splitlines():
            prompted = line.strip().startswith("$ ")
            if prompted or (fence.language in SHELLS - {"console"} and line.strip()):
                found.append((fence.where, line.strip().removeprefix("$ ")))
    return found


def inline(readme: Path) -> list[tuple[str, str]]:
    """The commands of `launch` and pytest in running text and tables; a verb alone is its name."""
    from launcher.cli.commands import app

    root: Any = typer.main.get_command(app)
    verbs = {f"launch {verb}" for verb in root.commands}
    text = re.sub(r"^```.*?^```$", "", readme.read_text(), flags=re.DOTALL | re.MULTILINE)
    shown = (found[1].removesuffix(" …") for found in _INLINE.finditer(text))
    return [(str(readme.relative_to(ROOT)), line) for line in shown if line not in verbs]


def fault(line: str, folder: Path) -> str | None:
    """Why a line of a shell could not be typed in that folder or the root; None where it could."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[list[str]] = [[]]
    for word in lexer:
        if word in _SEPARATORS:
            words.append([])
        else:
            words[-1].append(word)
    faults = (_fault(command, folder) for command in words if command)
    return next((f"{line}: {found}" for found in faults if found), None)


def _fault(words: list[str], folder: Path) -> str | None:
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    match words:
        case ["export", *assignments] if all(_ASSIGNMENT.fullmatch(one) for one in assignments):
            return None
        case ["uv", "run", "--with", _, *rest] | ["uv", "run", *rest] if rest:
            return _fault(rest, folder)
        case ["launch", *rest]:
            return launch_fault(rest, folder)
        case ["pytest", *rest] | ["python", "-m", "pytest", *rest]:
            return _pytest_fault(rest)
        case ["python", "-m", module, *rest]:
            return _module_fault(module, rest)
        case [python, program, *rest] if python == "python" or _THEIR_PYTHON.fullmatch(python):
            return _program_fault(program, rest, folder)
        case ["pip", "install", *what] if what:
            return next((f"pip install {one}" for one in what if not _installable(one)), None)
        case ["eval", text] if inner := _SUBSHELL.fullmatch(text):
            return _fault(shlex.split(inner[1]), folder)
        case ["cp", source, _]:
            return None if (ROOT / source).exists() else f"there is no {source}"
        case ["chmod", mode, _]:
            return None if mode.isdecimal() else f"chmod {mode}"
        case [tune, "run", recipe, *keys] if tune.endswith("bin/tune"):
            return _recipe_fault(recipe, keys)
    return f"nobody here knows how to judge {words[0] if words else 'nothing'}"


def launch_fault(words: list[str], folder: Path = ROOT) -> str | None:
    """What the real command line has against it, the values of its settings too."""
    from launcher.base.errors import LaunchError
    from launcher.cli.main import split

    own, program = split(words)
    try:
        invocation = parsed(own, program)
        if invocation is not None:
            _read(invocation)
    except typer.Exit:
        pass
    except (LaunchError, typer.TyperException) as error:
        return str(error)
    if not program or "ssh" in own:
        return None
    return None if program[0] in PLACEHOLDERS or "…" in program[0] else _fault(program, folder)


def parsed(own: list[str], program: list[str] | None) -> Any:
    """As `commands.invoke` parses, without doing anything; None for another verb than `plan`."""
    from launcher.cli.commands import app
    from launcher.cli.invocation import Invocation
    from launcher.console.output import Output

    root: Any = typer.main.get_command(app)
    context = root.make_context("launch", list(own), obj=Invocation(program, Output()))
    rest = [*context._protected_args, *context.args]
    if not rest:
        return context.obj.with_options(context.params)
    name, verb, arguments = root.resolve_command(context, rest)
    of_verb = verb.make_context(name, arguments, parent=context)
    return context.obj.with_options(of_verb.params) if name == "plan" else None


def _read(invocation: Any) -> None:
    """The values of settings, by the reader of settings, where nothing else is set."""
    from launcher.base.home import Home
    from launcher.config import setting_sources

    # Names in capitals stand for what the reader has, and so does the name of an earlier run.
    flags = {key: it for key, it in invocation.flags.items() if key != "from" and not _stands_for(it)}
    sets = tuple(one for one in invocation.sets if not _stands_for(one.partition("=")[2]))
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(empty)
        home = Home(folder, folder, folder)
        setting_sources.load(flags, sets, None, environ={}, folder=folder, home=home)


def _stands_for(value: object) -> bool:
    return isinstance(value, str) and (value == "…" or re.fullmatch(r"[A-Z_]+", value) is not None)


def _pytest_fault(words: list[str]) -> str | None:
    marks = {
        mark.partition(":")[0]
        for mark in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
            "markers"
        ]
    }
    rest = iter(words)
    for word in rest:
        if word == "-m":
            if strange := set(re.findall(r"\w+", next(rest, ""))) - marks - {"not", "or", "and"}:
                return f"no such mark: {', '.join(sorted(strange))}"
        elif word == "-k":
            next(rest, None)
        elif word.startswith("-"):
            if word not in {"-q", "--one-by-one", "--every-turn"}:
                return f"no known option of pytest: {word}"
        elif not (ROOT / word.partition("::")[0]).exists():
            return f"there is no {word}"
    return None


def _module_fault(module: str, words: list[str]) -> str | None:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return f"there is no module {module}"
    return _options_fault(Path(found.origin), words)


def _program_fault(program: str, words: list[str], folder: Path) -> str | None:
    if program in PLACEHOLDERS:
        return None
    places = [place / program for place in (folder, ROOT) if (place / program).is_file()]
    return _options_fault(places[0], words) if places else f"there is no {program}"


def _options_fault(path: Path, words: list[str]) -> str | None:
    """An option stands in the program's own text, or in that of what it imports of the tests' support."""
    parsed = ast.parse(path.read_text())
    imports = [node for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom)]
    names = [one.name for node in imports if node.module == "tests.support" for one in node.names]
    texts = [parsed, *(ast.parse((ROOT / "tests" / "support" / f"{it}.py").read_text()) for it in names)]
    constants = {it.value for text in texts for it in ast.walk(text) if isinstance(it, ast.Constant)}
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    return next((f"{path.name} has no {option}" for option in options if option not in constants), None)


def _installable(what: str) -> bool:
    """uv, this checkout with its extras, SkyPilot's for one more cloud, or what tests give ART's client."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if what == "uv" or what in foreign_environments.ART:
        return True
    if cloud := _SKYPILOT.fullmatch(what):
        return project["cloud"][0].endswith(f"=={cloud[1]}")
    return re.fullmatch(r"\.\[[\w,]+\]", what) is not None and set(what[2:-1].split(",")) <= set(project)


def _recipe_fault(recipe: str, words: list[str]) -> str | None:
    if not (ROOT / recipe).is_file():
        return f"there is no {recipe}"
    config = (ROOT / recipe).parent / "configs" / f"{Path(recipe).stem}.yaml"
    known = set(re.findall(r"^(\w+):", config.read_text(), re.MULTILINE))
    given = {word.partition("=")[0] for word in words if "=" in word}
    return f"the recipe has no {', '.join(sorted(given - known))}" if given - known else None


def python_fault(fence: Fence) -> str | None:
    """It compiles, what it imports is there, and what it calls of ours takes the names it is given."""
    try:
        parsed = ast.parse(fence.text)
    except SyntaxError as error:
        return f"{fence.where}: {error}"
    ours: dict[str, Any] = {}
    for node in ast.walk(parsed):
        names = [it.name for it in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if importlib.util.find_spec(name) is None:
                return f"{fence.where}: there is no module {name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("launcher"):
            module = importlib.import_module(node.module or "")
            for one in node.names:
                if not hasattr(module, one.name):
                    return f"{fence.where}: {node.module} has no {one.name}"
                ours[one.asname or one.name] = getattr(module, one.name)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            keywords = {one.arg: None for one in node.keywords if one.arg}
            try:
                inspect.signature(ours[node.func.id]).bind_partial(*node.args, **keywords)
            except TypeError as error:
                return f"{fence.where}: {node.func.id}: {error}"
    return None
