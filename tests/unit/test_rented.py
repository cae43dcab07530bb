"""launcher/rented.py: plain ssh is offered once, before anything is rented, and what was said holds."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher import rented
from launcher.config import load
from launcher.home import Home
from launcher.machines import ssh_config
from launcher.machines.base import Machine
from launcher.output import Output
from launcher.plan import Market, Offer, Plan, make_plan


class _Machine:
    """What announce looks at."""

    price_per_hour = 27.52

    def describe(self) -> dict[str, Any]:
        return {"standing": {"where": "AWS/us-east-1", "instance_type": "p5.24xlarge"}}


@dataclass
class Laptop:
    """A user's home and data folder; `asked` counts the questions."""

    runs: Path
    plan: Plan
    monkeypatch: pytest.MonkeyPatch
    asked: int = 0

    def run(self, answer: str | None = None, *, yes: bool = False) -> bool:
        """One run: agreed on, announced. `answer` None: there is no terminal. Whether ssh finds it."""
        self.monkeypatch.setattr("launcher.consent.somebody_is_here", lambda: answer is not None)
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(answer or ""))
        stderr = io.StringIO()
        output = Output(plain=True, stdout=io.StringIO(), stderr=stderr, environ={})
        rented.agree_on_ssh(output, self.plan, self.runs, yes)
        self.asked += stderr.getvalue().count("[y/N]")
        machine: Any = _Machine()
        checked: Machine = machine
        rented.announce(output, checked, self.plan, "demo", self.runs, yes)
        found = ssh_config.included(self.runs)
        ssh_config.forget(self.runs / "slip-0123abcd")
        return found


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laptop:
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "data" / "runs" / "slip-0123abcd").mkdir(parents=True)
    settings = load({"gpus": "H100:4"}, environ={}, folder=tmp_path, home=Home(*[tmp_path / "none"] * 3))
    offer = Offer("aws", "aws/us-east-1", "p5.24xlarge", "H100", 4, 27.52)
    plan = make_plan(settings, Market((offer,), {"H100": [4]}))
    return Laptop(tmp_path / "data" / "runs", plan, monkeypatch)


def test_the_line_in_the_users_ssh_config_is_asked_for_once(laptop: Laptop) -> None:
    assert laptop.run("y\n")
    assert laptop.run("")  # it went with the last run, and comes without being asked for again
    assert laptop.asked == 1


def test_a_no_holds_also_where_everything_else_is_agreed_to_beforehand(laptop: Laptop) -> None:
    assert not laptop.run("n\n")
    assert not laptop.run("")
    assert not laptop.run(yes=True)
    assert laptop.asked == 1


def test_without_a_terminal_only_yes_adds_it(laptop: Laptop) -> None:
    assert not laptop.run()
    assert laptop.run(yes=True)
    assert laptop.asked == 0
    assert not list(laptop.runs.parent.glob("*.json"))


def test_a_run_on_this_computer_asks_for_nothing(laptop: Laptop) -> None:
    laptop.plan = replace(laptop.plan, rented=None)
    output = Output(plain=True, stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    laptop.monkeypatch.setattr("launcher.consent.can_ask", lambda output: pytest.fail("asked"))
    rented.agree_on_ssh(output, laptop.plan, laptop.runs, False)
