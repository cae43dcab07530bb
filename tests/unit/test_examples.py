"""Each example can be copied alone, its French is right, and the held-out phrases were never trained on."""

from __future__ import annotations

import ast
import html
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runtime.tiny import grammar
from tests.support.environment import REPOSITORY

# Beside an example that trains it, as somebody else's would be installed.
ENVIRONMENTS = {"verifiers_french"}
EXAMPLES = sorted(it for it in (REPOSITORY / "examples").glob("*.py") if it.stem not in ENVIRONMENTS)
NOTEBOOK = REPOSITORY / "examples" / "notebook.ipynb"
# The shortest have no options: they are read as a whole, and begin at once.
WITH_OPTIONS = [path for path in EXAMPLES if path.stem not in {"hello", "verifiers_env", "openenv_env"}]
# What is read first is short.
MOST_LINES = {"hello": 30, "loop": 150, "verifiers_env": 45, "openenv_env": 45}
TRANSLATING = ("quickstart", "two_predictors", "arbor_quickstart", "better_together")
# With `--offline`, and public data without it.
OFFLINE = ("arbor_quickstart", "better_together", "classify", "papillon", "summarise_ruler")
# With `--offline`, and larger data of its own without it.
MADE = ("email_search", "temporal_clue")
# What `launch --arbor` puts on a program's path.
ARBORS_PLACE = REPOSITORY / "launcher" / "client" / "arbor" / "on_path"
# What `pip install slipway-rl[dspy]` brings, and our own public surface.
INSTALLED = {"dspy", "matplotlib", "openai"}
# The same sentence in each header, behind the commands: offline as it was seen, rented as it is estimated.
_TIME = r"(?:an?|half an|two|three|four|five|six|seven|ten) (?:minutes?|hours?)"
COST = re.compile(
    rf"Cost and duration: offline \$0\.00 and {_TIME} on 2 busy cores; "
    rf"rented about \$\d+ and {_TIME} on one H100(?:, (?:the judge|gpt-4\.1-mini) included)? \(estimated\)\."
)
# What a run on somebody's machine might leave in a notebook: paths, addresses, keys.
TRACES = re.compile(
    r"(?:^|[\s'\"(=])~?/\w+/|\w:\\\\|://|\d+\.\d+\.\d+\.\d+|localhost|Bearer|\b(?:sk|slip)-\w+"
)
# Only under `launch --arbor`, where the data is not our own, and where the environment is not.
BESIDE = {"arbor", "datasets", "verifiers", "openenv"}
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


def header(path: Path) -> str:
    """The docstring of an example, or the first cell of the notebook."""
    if path == NOTEBOOK:
        return "".join(json.loads(path.read_text())["cells"][0]["source"])
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ARBORS_PLACE)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_our_client_and_what_is_installed_alone(path: Path) -> None:
    others = {name for name in imported(path) if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {OURS, "arbor"} & others
    assert {name.partition(".")[0] for name in others - {OURS}} <= INSTALLED | BESIDE


@pytest.mark.parametrize("name", MOST_LINES)
def test_what_is_read_first_is_short(name: str) -> None:
    lines = (REPOSITORY / "examples" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= MOST_LINES[name]


def test_every_example_is_in_the_page_of_the_examples() -> None:
    page = (REPOSITORY / "examples" / "README.md").read_text()
    assert not [path.name for path in EXAMPLES if f"({path.name})" not in page]


@pytest.mark.process
@pytest.mark.parametrize("path", WITH_OPTIONS, ids=lambda path: path.stem)
def test_an_example_copied_alone_says_its_options_in_another_folder(path: Path, tmp_path: Path) -> None:
    copied = tmp_path / path.name
    copied.write_bytes(path.read_bytes())
    done = subprocess.run(
        [sys.executable, copied.name, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ARBORS_PLACE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--steps" in done.stdout


@pytest.mark.process
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
    assert quickstart.exact_match(example, said(f" {example.french.upper()}\n")) == 1.0
    assert quickstart.exact_match(example, said(example.french + " noir")) == 0.0
    assert quickstart.unique_letters(example, said("Été, été! 12")) == 2


def test_the_pages_have_the_figures_of_the_run_in_the_picture() -> None:
    picture = html.unescape((REPOSITORY / "examples" / "demo.svg").read_text()).replace("\xa0", " ")
    found = re.search(r"held-out: 0\.(\d\d) ± 0\.\d\d → 0\.(\d\d) ± 0\.\d\d over 300 phrases", picture)
    assert found is not None
    front = " ".join((REPOSITORY / "README.md").read_text().split())
    said = rf"Of 300 held-out phrases {found[1]} % were right before, and \d\d to {found[2]} % \(by seed\)"
    assert re.search(said, front)
    assert "@font-face" not in picture, "whoever looks at it asks nobody for a font"


@pytest.mark.parametrize("name", OFFLINE + MADE)
def test_a20_the_head_of_an_example_says_how_to_run_it_and_what_to_beat(name: str) -> None:
    head = header(REPOSITORY / "examples" / f"{name}.py")
    arbor = " --arbor" if name == "arbor_quickstart" else ""
    assert f"launch{arbor} -- python {name}.py --offline" in head
    assert f"launch{arbor} --gpus H100" in head
    assert "Figure to beat: " in head.partition("Cost and duration: ")[2]


@pytest.mark.parametrize("path", [*EXAMPLES, NOTEBOOK], ids=lambda path: path.stem)
def test_a20_the_head_of_every_example_says_price_and_time_behind_its_commands(path: Path) -> None:
    paragraphs = [" ".join(it.split()) for it in header(path).split("\n\n")]
    (place,) = [number for number, it in enumerate(paragraphs) if it.startswith("Cost and duration: ")]
    assert COST.fullmatch(paragraphs[place]), paragraphs[place]
    command = "launch up" if path == NOTEBOOK else f"{path.name}"
    assert "launch" in paragraphs[place - 1] and command in paragraphs[place - 1]


@pytest.mark.process
def test_a20_offline_data_is_the_same_for_a_seed_and_the_tiny_model_knows_its_words() -> None:
    known = {word for it in grammar.phrases(20_000) for word in f"{it.english} {it.french}".split()}
    classify, papillon = load("classify"), load("papillon")
    labelled = [(it.text, it.label) for _ in range(2) for it in classify.colour_task(60, 3)[0]]
    assert labelled[:60] == labelled[60:] and len(dict(labelled)) == 60
    assert {word for pair in labelled for word in " ".join(pair).split()} <= known
    (train, test), again = papillon.phrases(60, 20, 3), papillon.phrases(60, 20, 3)
    assert (train, test) == again
    assert not {it.user_query for it in train} & {it.user_query for it in test}
    assert {word for it in train + test for word in it.user_query.split()} <= known
    assert {form for forms in papillon.ADJECTIVES.values() for form in forms} <= known


@pytest.mark.process
def test_a08_the_stand_ins_of_papillon_judge_by_their_rules() -> None:
    papillon = load("papillon")
    assert papillon.drop_wrong_adjectives("mon chat noir sous la porte noir") == "mon chat noir sous la porte"
    server = papillon.OfflineServer()
    outside = papillon.dspy.LM("openai/gpt-4.1-mini", api_base=server.address, api_key="offline", cache=False)
    assert outside("mon noir chat") == ["mon chat"]
    judge = papillon.Judge(outside)
    of = {"user_query": "my black cat", "old": "my cat", "pieces": ["my"]}
    good = judge(new="my black cat", request="le chat noir", **of)
    assert (good.quality, good.leakage) == (1.0, 0.0)
    bad = judge(new="the dog", request="mon chat noir", **of)
    assert (bad.quality, bad.leakage) == (0.0, 1.0)
    assert server.request_count == 7


def test_a08_papillon_never_takes_the_key_of_the_run_for_one_of_openai(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    papillon = load("papillon")
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-run")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:7453/v1")
    with pytest.raises(SystemExit, match="JUDGE_API_KEY"):
        papillon.own_key()
    monkeypatch.setenv("JUDGE_API_KEY", "of-the-user")
    assert papillon.own_key() == "of-the-user"


@pytest.mark.parametrize("name", OFFLINE)
def test_a20_where_the_data_needs_a_package_the_error_has_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match='pip install "datasets>=3"'):
        load(name).loader()
    described = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert described["project"]["optional-dependencies"]["examples"] == ["datasets>=3"]
    assert "examples" not in described["dependency-groups"]["dev"][0], "CI installs nothing of it"


@pytest.mark.process  # imports DSPy
def test_a20_a_label_of_banking77_is_one_of_its_names_and_any_case_of_it_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As DSPy types a label: an answer that is no label does not parse. One of Banking77's has a capital."""

    class Rows(list[dict[str, Any]]):
        features = {"label": SimpleNamespace(names=["Refund_not_showing_up", "reverted_card_payment?"])}

        def shuffle(self, seed: int) -> Rows:
            return self

        def select(self, places: range) -> Rows:
            return Rows(self[place] for place in places)

    rows = Rows({"text": f"question {number}", "label": number % 2} for number in range(9))
    datasets = SimpleNamespace(load_dataset=lambda name, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    classify = load("classify")
    examples, signature = classify.banking77_task(4, 0)
    assert [it.label for it in examples] == ["Refund_not_showing_up", "reverted_card_payment?"] * 2
    adapter = classify.dspy.ChatAdapter()
    answer = "[[ ## label ## ]]\n{}\n\n[[ ## completed ## ]]".format
    (right,) = [classify.dspy.Prediction(adapter.parse(signature, answer(examples[0].label)))]
    assert [classify.label_match(it, right) for it in examples] == [1.0, 0.0] * 2
    with pytest.raises(classify.dspy.utils.exceptions.AdapterParseError):
        adapter.parse(signature, answer("a refund"))


def notebook_cells() -> list[dict[str, Any]]:
    """Those of code, each with its source as one text."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [it | {"source": "".join(it["source"])} for it in cells if it["cell_type"] == "code"]


def notebook_texts() -> list[str]:
    """Every text of an output, as it was printed."""
    outputs = [output for cell in notebook_cells() for output in cell["outputs"]]
    shown = [it["text"] if it["output_type"] == "stream" else it["data"]["text/plain"] for it in outputs]
    return ["".join(it) for it in shown]


def test_a20_the_notebook_does_the_task_of_hello_word_for_word() -> None:
    hello = (REPOSITORY / "examples" / "hello.py").read_text()
    task = hello[hello.index("NOUNS = ") : hello.index("\nprogram = ")].strip()
    cells = [cell["source"] for cell in notebook_cells()]
    assert task in cells
    settings = re.search(r"= GRPO\((.*)\)", hello)
    assert settings is not None and f"GRPO({settings[1]}, session=run)" in "\n".join(cells)


def test_a20_the_notebook_is_committed_as_it_ran_from_its_first_cell_to_its_last() -> None:
    cells = notebook_cells()
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {it["output_type"] for it in outputs} <= {"stream", "display_data"}, "no error, no leftover value"
    assert any("image/png" in it.get("data", {}) for it in outputs)
    texts = "\n".join(notebook_texts())
    (steps,) = re.findall(r"num_train_steps=(\d+)", "\n".join(cell["source"] for cell in cells))
    assert f"grpo: step {steps}/{steps} " in texts
    assert not TRACES.findall(texts)


def test_a20_the_rise_in_the_notebook_can_be_seen() -> None:
    texts = "\n".join(notebook_texts())
    found = re.search(r"held-out: (\S+) → (\S+) of 50 phrases are right", texts)
    assert found is not None and float(found[2]) > float(found[1]) + 0.4
    rewards = [float(it) for it in re.findall(r"^step +\d+  reward (\S+)", texts, re.MULTILINE)]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.4
