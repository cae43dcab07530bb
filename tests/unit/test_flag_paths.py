"""Four flags, from the command line to where they act: each stop has the value, and few steps climb back.

A stop is a function that has the value in its hands, in the order in which it gets it, and the name that the
value goes by there. A climb is a step to a folder on a higher floor of the same half.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass

import pytest

from tests.support.readmes import ROOT
from tests.unit.test_tree import FLOORS

MOST_CLIMBS = 3


@dataclass(frozen=True)
class Way:
    """A flag's way: how often it climbs, and its stops: file, function, the value's name."""

    climbs: int
    stops: tuple[tuple[str, str, str], ...]


def _read(flag: str, settings: str) -> tuple[tuple[str, str, str], ...]:
    """What all flags have in common: the command line is read, then the settings' sources."""
    return (
        ("launcher/cli/commands.py", "root", flag),
        ("launcher/cli/invocation.py", "with_options", settings),
        ("launcher/run/launching.py", "launch_run", settings),
        ("launcher/config/request_parsing.py", "parse_request", settings),
    )


WAYS = {
    # `_check_limits` ends the run. On the way up `Run._enter` asks the same limits; the machine gets them as
    # one deadline for its keeper, the way of `--lease`.
    "--budget": Way(
        3,
        (
            *_read("budget", "flags"),
            ("launcher/config/setting_sources.py", "load", "budget"),
            ("launcher/run/launching.py", "launch_run", "settings"),
            ("launcher/config/pricing.py", "make_priced_plan", "settings"),
            ("launcher/types/plan.py", "make_plan", "budget"),
            ("launcher/run/launching.py", "launch_run", "plan"),
            ("launcher/run/run.py", "execute", "budget"),
            ("launcher/records/lease.py", "Limits.reached", "budget"),
            ("launcher/run/work.py", "_check_limits", "limits"),
        ),
    ),
    # The trainer loads it in `runtime/recipes/grpo_lora.py`, the engine is vLLM's `--model`.
    "--model": Way(
        2,
        (
            *_read("model", "flags"),
            ("launcher/config/setting_sources.py", "load", "model"),
            ("launcher/run/launching.py", "launch_run", "parsed"),
            ("launcher/config/request_validation.py", "validate", "model"),
            ("launcher/config/preflight.py", "find_model", "model"),
            ("launcher/run/launching.py", "launch_run", "model_path"),
            ("launcher/run/run.py", "_runtime_config", "model_path"),
            ("launcher/config/runtime_config.py", "build", "ours"),
            ("launcher/backends/local_machine.py", "serve", "config"),
            ("runtime/__main__.py", "children", "config"),
            ("runtime/trainer/command.py", "trainer_command", "model_path"),
            ("runtime/engine/command.py", "arguments", "model_path"),
        ),
    ),
    # Here it is renewed: `Run._connect` gives the same seconds to `launcher/run/runtime_monitor.py`.
    "--lease": Way(
        1,
        (
            *_read("lease", "flags"),
            ("launcher/config/setting_sources.py", "load", "lease"),
            ("launcher/run/launching.py", "launch_run", "settings"),
            ("launcher/run/run.py", "_runtime_config", "lease_seconds"),
            ("launcher/config/runtime_config.py", "build", "ours"),
            ("launcher/backends/local_machine.py", "serve", "config"),
            ("launcher/backends/local_machine.py", "_start_keeper", "config"),
            ("runtime/keeper.py", "main", "lease_seconds"),
            ("runtime/keeper.py", "_watch", "lease_seconds"),
        ),
    ),
    # There it is AdamW's learning rate.
    "--set train.learning_rate": Way(
        2,
        (
            *_read("settings", "sets"),
            ("launcher/config/setting_sources.py", "load", "sets"),
            ("launcher/config/setting_sources.py", "_overrides", "overrides"),
            ("launcher/run/launching.py", "launch_run", "settings"),
            ("launcher/run/run.py", "_runtime_config", "overrides"),
            ("launcher/config/runtime_config.py", "build", "overrides"),
            ("launcher/backends/local_machine.py", "serve", "config"),
            ("runtime/__main__.py", "children", "config"),
            ("runtime/trainer/command.py", "trainer_command", "train"),
            ("runtime/recipes/grpo_lora.py", "setup", "learning_rate"),
        ),
    ),
}


@pytest.mark.parametrize("flag", WAYS)
def test_each_stop_of_a_flag_is_there_and_has_the_value(flag: str) -> None:
    assert not [stop for stop in WAYS[flag].stops if stop[2] not in _names(*stop[:2])]


@pytest.mark.parametrize("flag", WAYS)
def test_a_flag_climbs_as_often_as_is_said_and_seldom(flag: str) -> None:
    floors = [_floor(file) for file, _, _ in WAYS[flag].stops]
    climbs = sum(there[0] == here[0] and there[1] > here[1] for here, there in itertools.pairwise(floors))
    assert climbs == WAYS[flag].climbs <= MOST_CLIMBS


def _floor(file: str) -> tuple[str, int]:
    room = file.rpartition("/")[0]
    half = file.partition("/")[0]
    return half, FLOORS[half].index(room)


def _names(file: str, function: str) -> set[str]:
    """Every name, attribute, argument and keyword in a function."""
    name = function.rpartition(".")[2]
    parsed = ast.parse((ROOT / file).read_text())
    bodies = [node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef) and node.name == name]
    names: set[str] = set()
    for node in (inner for body in bodies for inner in ast.walk(body)):
        match node:
            case ast.Name(id=found) | ast.Attribute(attr=found) | ast.arg(arg=found):
                names.add(found)
            case ast.keyword(arg=str(found)) | ast.Constant(value=str(found)):
                names.add(found)
    return names
