"""Every command and program in a README could be typed: parsed by the real command line, its files there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import readme_commands, readmes

READMES = [pytest.param(path, id=str(path.relative_to(readmes.ROOT))) for path in readmes.every()]
pytestmark = pytest.mark.process


@pytest.mark.parametrize("readme", READMES)
def test_every_command_of_a_block_could_be_typed(readme: Path) -> None:
    shown = readme_commands.commands(readme)
    faults = [
        (where, found) for where, line in shown if (found := readme_commands.fault(line, readme.parent))
    ]
    assert not faults


@pytest.mark.parametrize("readme", READMES)
def test_every_command_in_running_text_could_be_typed(readme: Path) -> None:
    shown = readme_commands.inline(readme)
    faults = [
        (where, found) for where, line in shown if (found := readme_commands.fault(line, readme.parent))
    ]
    assert not faults


@pytest.mark.parametrize("readme", READMES)
def test_every_python_block_compiles_and_finds_what_it_imports(readme: Path) -> None:
    blocks = [fence for fence in readmes.fences(readme) if fence.language == "python"]
    assert not [found for fence in blocks if (found := readme_commands.python_fault(fence))]


@pytest.mark.parametrize(
    "line",
    [
        "launch --budgett 40 -- python optimize.py",
        "launch --lease 1s -- python optimize.py",
        "launch --set train.lerning_rate=1 -- python optimize.py",
        "launch statuss demo",
        "launch logs demo --folow",
        "launch plan --gpus H100:none",
        "launch -- python examples/nowhere.py",
        "uv run launch -- python examples/quickstart.py --rewards right",
        "python -m tests.readme_nothing --write",
        "python -m tests.readme_tree --wirte",
        "uv run pytest -m quik",
        "uv run pytest tests/unit/test_nothing.py",
        "pip install something-else",
        "pip install openpipe-art==0.5.17",
        "launch -- THEIR_ENVIRONMENT/bin/python nowhere.py",
        "pip install '.[clouds]'",
        "curl example.org && uv run pytest",
    ],
)
def test_a_command_that_cannot_be_typed_is_a_fault(line: str) -> None:
    assert readme_commands.fault(line, readmes.ROOT)
