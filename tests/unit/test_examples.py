"""Each example can be copied alone, its French is right, and the held-out phrases were never trained on."""

from __future__ import annotations

import ast
import html
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from runtime.tiny import grammar
from tests.picture import COLUMNS
from tests.support.environment import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
TRANSLATING = ("quickstart", "two_predictors")
# What `pip install slipway-rl[dspy]` brings, and our own public surface.
INSTALLED = {"dspy", "matplotlib"}
# What an example asks for by its `pip install` line, where its real data are wanted.
ASKED_FOR = {"datasets"}
OURS = "launcher.client"


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} imports from beside it"
            found.add(node.module or "")
    return found


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_our_client_and_what_is_installed_alone(path: Path) -> None:
    others = {name for name in imported(path) if name.partition(".")[0] not in sys.stdlib_module_names}
    assert OURS in others
    assert {name.partition(".")[0] for name in others - {OURS}} <= INSTALLED | ASKED_FOR


@pytest.mark.process
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_copied_alone_says_its_options_in_another_folder(path: Path, tmp_path: Path) -> None:
    copied = tmp_path / path.name
    copied.write_bytes(path.read_bytes())
    done = subprocess.run(
        [sys.executable, copied.name, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "--steps" in done.stdout


@pytest.mark.parametrize("name", TRANSLATING)
def test_the_right_french_of_an_example_is_the_grammars(name: str) -> None:
    """Every word and every form of it is one that the tiny model learnt from, adjectives in their place."""
    known = {phrase.english: phrase.french for phrase in grammar.phrases(60_000)}
    examples = [example for held_out in (False, True) for example in load(name).phrases(1500, 3, held_out)]
    both = [example for example in examples if example.english in known]
    assert len(both) > 200
    assert {it.english: it.french for it in both} == {it.english: known[it.english] for it in both}
    words = {word for english, french in known.items() for word in f"{english} {french}".split()}
    assert {word for it in examples for word in f"{it.english} {it.french}".split()} <= words


@pytest.mark.parametrize("name", TRANSLATING)
def test_nothing_that_an_example_is_judged_on_was_ever_trained_on(name: str) -> None:
    phrases = load(name).phrases
    trained = {it.english for seed in range(3) for it in phrases(240, seed, held_out=False)}
    judged = {it.english for seed in range(3) for it in phrases(400, seed, held_out=True)}
    assert not trained & judged
    assert all(map(grammar.is_held_out, judged)), "nor when the tiny model was made"


def test_a_right_translation_earns_one_and_letters_are_counted_without_accents() -> None:
    quickstart = load("quickstart")
    (example,) = quickstart.phrases(1, 0, held_out=True)
    said = lambda text: quickstart.dspy.Prediction(french=text)  # noqa: E731
    assert quickstart.right(example, said(f" {example.french.upper()}\n")) == 1.0
    assert quickstart.right(example, said(example.french + " noir")) == 0.0
    assert quickstart.letters(example, said("Été, été! 12")) == 2


def test_the_picture_and_the_text_beside_it_are_of_one_run() -> None:
    picture = html.unescape((REPOSITORY / "examples" / "demo.svg").read_text()).replace("\xa0", " ")
    readme = (REPOSITORY / "examples" / "README.md").read_text()
    run = readme.partition("<!-- run -->")[2].split("```")[1].splitlines()[1:]
    assert any(line.startswith("held-out: ") for line in run)
    assert all(line in picture for line in run if len(line) <= COLUMNS)
    assert "@font-face" not in picture, "whoever looks at it asks nobody for a font"
