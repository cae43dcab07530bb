"""The embedded agent model through the product: what it does before training, and that it learns (`long`).

What is measured goes to `$SLIPWAY_LONG_DIR`, for bench/RESULTS.md.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import make_home
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.foreign_environments import AGENTS, SMOLAGENTS, python_with
from tests.support.launched import Launched
from tests.support.ports import free_port

pytestmark = pytest.mark.long

SEEDS = (0, 1, 2)
EXAMPLES = REPOSITORY / "examples"


def launched_on_it(folder: Path, *program: str) -> str:
    """What the program prints."""
    words = ["--model", "tiny-agent", "--port", str(free_port()), "--", *program]
    launched = Launched(make_home(folder / "home"), words, cwd=REPOSITORY)
    try:
        assert launched.wait(3600) == 0, launched.stdout + launched.stderr
    finally:
        launched.kill_tree()
    return launched.stdout


def keep(name: str, found: Any) -> None:
    if folder := os.environ.get("SLIPWAY_LONG_DIR"):
        Path(folder, f"{name}.json").write_text(json.dumps(found, indent=2))


def figures(module: str, folder: Path) -> dict[str, Any]:
    out = folder / "figures.json"
    launched_on_it(folder, sys.executable, "-m", module, "--out", str(out))
    return json.loads(out.read_text())


def test_it_writes_each_format_and_calls_tools_before_any_training(tmp_path: Path) -> None:
    found = figures("examples.tiny_agent.figures", tmp_path)
    keep("tiny_agent_figures", found)
    assert {it["parsed"] >= 0.9 for it in found["formats"].values()} == {True}
    assert {it["called"] >= 0.8 for it in found["react"].values()} == {True}
    assert {it["right"] >= 0.5 for it in found["react"].values()} == {True}


def test_the_prompt_optimisers_run_on_it_and_one_finds_a_better_program(tmp_path: Path) -> None:
    found = figures("examples.tiny_agent.optimizers", tmp_path)["optimizers"]
    keep("tiny_agent_optimizers", found)
    assert not [it["errors"] for it in found.values() if it["failed_calls"]]
    assert min(it["instructions_tried"] for it in found.values()) >= 3
    assert any(it["difference"] > 2 * it["standard_error"] for it in found.values())


def test_a_label_task_learns_over_three_seeds(tmp_path: Path) -> None:
    program = str(PROGRAMS / "e2e" / "tickets.py")
    found = []
    for seed in SEEDS:
        said = launched_on_it(tmp_path / str(seed), sys.executable, program, str(seed))
        found.append(json.loads([line for line in said.splitlines() if line.startswith("{")][-1]))
    keep("tiny_agent_tickets", found)
    assert all(it["rise"] > 2 * it["standard_error"] for it in found)


def test_a_tool_task_learns_over_three_seeds(tmp_path: Path) -> None:
    found = []
    for seed in SEEDS:
        program = [sys.executable, str(EXAMPLES / "shop_agent.py"), "--seed", str(seed)]
        said = launched_on_it(tmp_path / str(seed), *program)
        rise = re.search(r"^held-out: (\S+) → ([\d.]+)", said, re.MULTILINE)
        assert rise is not None, said
        found.append((float(rise[1]), float(rise[2])))
    keep("tiny_agent_shop", found)
    for before, after in found:
        error = (before * (1 - before) / 60 + after * (1 - after) / 60) ** 0.5
        assert after - before > 2 * error


@pytest.mark.parametrize(
    ("packages", "program"), [(SMOLAGENTS, "smolagents_shop.py"), (AGENTS, "agents_shop.py")]
)
def test_an_agent_of_others_calls_its_tool_and_trains(
    packages: tuple[str, ...], program: str, tmp_path: Path
) -> None:
    place = str(PROGRAMS / "foreign" / program)
    words = ["env", f"PYTHONPATH={REPOSITORY}", str(python_with(packages)), place, "3"]
    said = launched_on_it(tmp_path, *words)
    steps = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])["steps"]
    keep(program.removesuffix(".py"), steps)
    assert len(steps) == 3
    assert steps[0]["called"] >= 0.5
    for step in steps:
        counts = step["counts"]
        assert counts["trained"] and set(counts["dropped"]) <= {"no_variance"}
