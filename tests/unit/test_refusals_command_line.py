"""Words of `launch` that mean nothing, or nothing there: options, verbs, values, and anything at all.

What a program, a file, a model or this computer is refused for: the other `test_refusals_*.py`.
"""

# ruff: noqa: E501 - tables: a line is a case
from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base.home import Home
from launcher.cli.main import split
from launcher.config import preflight
from launcher.records.records import RecordStore
from tests.support import readme_commands
from tests.support.refusals import Place, Refused, check, place
from tests.support.typed import Typed

__all__ = ["place"]

pytestmark = pytest.mark.process

# typed | exit code | what | why | hint
COMMAND_LINE = [
    Refused("--modle x", 2, "no such option: --modle", "did you mean --model?", "launch --help"),
    Refused("ps", 2, "ps is not a verb", "did you mean status?", "launch status"),
    Refused("ls ./runs", 2, "ls is not a verb", "did you mean status?", "launch status"),
    Refused("start train.py", 2, "start is not a verb", "did you mean up?", "launch up"),
    Refused("kill dev -f", 2, "kill is not a verb", "did you mean down?", "launch down dev"),
    Refused("--model tinny -- true", 3, "no model tinny", "did you mean tiny?", "launch --model tiny"),
    Refused("statsu", 2, "statsu is not a verb", "did you mean status?", "launch status"),
    Refused("status --model x", 2, "--model cannot be used with status", "an option of a run", "launch status --help"),
    Refused("config --resume x", 2, "--resume cannot be used with config", "an option of a run", "launch config --help"),
    Refused("bench --bogus", 2, "no such option: --bogus", "the command line could not be read", "launch bench --help"),
    Refused("bench --seed 2", 2, "no such option: --seed", "did you mean --seeds?", "launch bench --help"),
    Refused("status --jsn", 2, "no such option: --jsn", "did you mean --json?", "launch status --help"),
    Refused("--max 4", 2, "--max: '4' is not valid", "a number with a unit: 90s, 15m, 4h", "launch --help"),
    Refused("--max 0", 2, "--max: '0' is not valid", "a number with a unit", "launch --help"),
    Refused("--max 0s", 2, "--max: '0s' is not valid", "must be longer than zero", "launch --help"),
    Refused("--max 9999d", 2, "--max: '9999d' is not valid", "at most a year", "launch --help"),
    Refused("--budget -1", 2, "--budget: '-1' is not valid", "more than zero", "launch --help"),
    Refused("--budget much", 2, "--budget: 'much' is not valid", "US dollars: 40", "launch --help"),
    Refused("--lease soon", 2, "--lease: 'soon' is not valid", "90s, 15m, 4h", "launch --help"),
    Refused("--lease 1s", 2, "--lease: '1s' is not valid", "the minimum is 15 s", "launch --help"),
    Refused("--port 80", 2, "--port: '80' is not valid", "from 1024 to 65535", "launch --help"),
    Refused("--wandb maybe", 2, "--wandb: 'maybe' is not valid", "disabled, offline, online", "launch --help"),
    Refused("--set", 2, "--set", "could not be read", "launch --help"),
    Refused("--set train.seed", 2, "--set train.seed: no value", "KEY=VALUE", "launch --set train.seed=VALUE"),
    Refused("--set zebra=1", 2, "--set zebra: no such setting", "`launch config` lists every key", "launch config"),
    Refused("--set train.sed=1", 2, "no such setting", "did you mean train.seed?", "--set train.seed=1"),
    Refused("--set lease=4m", 2, "this setting has its own option", "--lease", "launch --lease 4m"),
    Refused("--set state_dir=/x", 2, "launch sets this itself", "depends on the options", "launch config"),
    Refused("--set train.lora.rank=0", 2, "'0' is not valid", "a whole number from 1 to 256", "launch config"),
    Refused("--set train.lora.rank=x", 2, "'x' is not valid", "a whole number from 1 to 256", "launch config"),
    Refused("--set train.seed=1.5", 2, "'1.5' is not valid", "expected a whole number", "launch config"),
    Refused("--set train.learning_rate=-1", 2, "'-1' is not valid", "a number above 0", "launch config"),
    Refused("--set train.learning_rate=nan", 2, "'nan' is not valid", "a number above 0", "launch config"),
    Refused("--set train.keep_checkpoints=1", 2, "'1' is not valid", "a whole number of 2 or more", "launch config"),
    Refused("--set train.scale_rewards=2", 2, "'2' is not valid", "true or false", "launch config"),
    Refused("--set train.loss=magic", 2, "'magic' is not valid", "expected one of grpo", "launch config"),
    Refused("--name Not_A_Name", 2, "'Not_A_Name' is not a valid run name", "1 to 40 of a-z", "--name my-run"),
    Refused("--name slip-0123abcd", 2, "is not a valid run name", "must not look like a run id", "--name my-run"),
    Refused("--name ../../x", 2, "'../../x' is not a valid run name", "a-z, 0-9 and -", "--name my-run"),
    Refused("--name dev", 2, "a run named dev is live", "its state: created", "launch status dev",
            done=lambda place: place.live_run("dev")),
    Refused("--gpus H100:4", 2, "there is no terminal", "renting GPUs costs money", "launch plan --gpus H100:4"),
    Refused("--gpus H100", 2, "there is no terminal", "renting GPUs costs money", "launch plan --gpus H100:1"),
    Refused("--gpus 100", 2, "--gpus: '100' is not valid", "TYPE:COUNT, such as H100:4", "launch --help"),
    Refused("--gpus H100:", 2, "--gpus: 'H100:' is not valid", "TYPE:COUNT", "launch --help"),
    Refused("--gpus 4:H100", 2, "--gpus: '4:H100' is not valid", "TYPE:COUNT", "launch --help"),
    Refused("--gpus H100:0", 2, "--gpus: 'H100:0' is not valid", "at least one GPU", "launch --help"),
    Refused("--gpus H100:-1", 2, "--gpus: 'H100:-1' is not valid", "TYPE:COUNT", "launch --help"),
    Refused("--gpus H100:1.5", 2, "--gpus: 'H100:1.5' is not valid", "TYPE:COUNT", "launch --help"),
    Refused("--gpus H100:99999", 2, "--gpus: 'H100:99999' is not valid", "TYPE:COUNT", "launch --help"),
    Refused("--gpus H100:4,A100:8", 2, "is not valid", "TYPE:COUNT", "launch --help"),
    Refused("plan --gpus H100:0", 2, "--gpus: 'H100:0' is not valid", "at least one GPU", "launch --help"),
    Refused("plan --gpuz H100:4", 2, "no such option: --gpuz", "did you mean --gpus?", "launch plan --help"),
    Refused("plan --resume dev", 2, "--resume cannot be used with plan", "an option of a run", "launch plan --help"),
    Refused("up -- python my.py", 2, "up runs no program", "takes no program", "launch -- python my.py"),
    Refused("--dry-run up", 2, "--dry-run cannot be used with up", "a run's option", "launch plan"),
    Refused("--resume dev up", 2, "--resume cannot be used with up", "the program that it had", "launch --resume dev"),
    Refused("up --gpus H100:0", 2, "--gpus: 'H100:0' is not valid", "at least one GPU", "launch --help"),
    Refused("up --gpus H100:4", 2, "there is no terminal", "renting GPUs costs money", "launch plan --gpus H100:4"),
    Refused("--resume dev --dry-run", 2, "--resume cannot be used with a plan", "a plan changes nothing", "launch status"),
    Refused("--dry-run status", 2, "--dry-run cannot be used with status", "a run's option", "launch status"),
    Refused("plan", 3, "launch.toml: '4' is not valid", "TYPE:COUNT", "launch --help",
            done=lambda place: place.write("launch.toml", "gpus = '4'")),
    Refused("--set train.lr=1", 2, "--set train.lr: no such", "did you mean train.learning_rate?", "launch --set train.learning_rate=1"),
    Refused("--grace 0s", 2, "--grace: '0s' is not valid", "must be longer than zero", "launch --help"),
    Refused("--grace 1h", 2, "--grace: '1h' is not valid", "the maximum is 2m", "launch --help"),
    Refused("--infra lambda", 2, "--infra needs --gpus", "on this computer", "leave out --infra"),
    Refused("--infra awz --gpus H100:4", 2, "--infra: 'awz' is not valid", "did you mean aws?", "launch --help"),
    Refused("--infra aws,awz", 2, "--infra: 'aws,awz' is not valid", "did you mean aws?", "launch --help"),
    Refused("--infra moon", 2, "--infra: 'moon' is not valid", "the clouds are aws, azure", "launch --help"),
    Refused("--infra aws//x", 2, "--infra: 'aws//x' is not valid", "CLOUD/REGION/ZONE", "launch --help"),
    Refused("--infra aws/a/b/c", 2, "is not valid", "CLOUD/REGION/ZONE", "launch --help"),
    Refused("--infra hyperbolic", 2, "is not valid", "cannot shut itself down, so it could be left running", "launch --help"),
    Refused("--infra aws --infra Verda", 2, "is not valid", "a machine on verda cannot shut itself down", "launch --help"),
    Refused("--train-gpus 1", 2, "--train-gpus needs --gpus", "on this computer", "such as --gpus H100:4"),
    Refused("--train-gpus none", 2, "--train-gpus: 'none' is not valid", "a whole number from 1", "launch --help"),
    Refused("--infer-gpus 0", 2, "--infer-gpus: '0' is not valid", "a whole number from 1", "launch --help"),
    Refused("--max-price free", 2, "--max-price: 'free' is not valid", "US dollars", "launch --help"),
    Refused("--max-price 20", 2, "--max-price needs --gpus", "on this computer", "such as --gpus H100:4"),
    Refused("--idle 90s", 2, "--idle: '90s' is not valid", "whole minutes, such as 10m", "launch --help"),
    Refused("--idle 10", 2, "--idle: '10' is not valid", "a number with a unit", "launch --help"),
    Refused("--disk 1TB", 2, "--disk: '1TB' is not valid", "a number of GB from 50", "launch --help"),
    Refused("--disk 3", 2, "--disk: '3' is not valid", "a number of GB from 50", "launch --help"),
    Refused("--max 4h status", 2, "--max cannot be used with status", "an option of a run", "launch status --help"),
    Refused("status -- x", 2, "status runs no program", "takes no program", "launch -- x"),
    Refused("logs", 2, "NAME", "could not be read", "launch logs --help"),
    Refused("gc --older-than 3", 2, "--older-than: '3' is not valid", "90s, 15m", "launch gc --older-than 7d"),
    Refused("down ../../x", 2, "there is no run '../../x'", "0 runs are recorded", "launch status"),
    Refused("pull /etc", 2, "there is no run '/etc'", "0 runs are recorded", "launch status"),
    Refused("logs dev --which ../../../etc/passwd", 2, "dev has no log ../../../etc/passwd", "it has launch", "launch logs dev --which launch",
            done=lambda place: place.live_run("dev")),
    Refused("logs dev --which record.json", 2, "dev has no log record.json", "it has launch", "--which",
            done=lambda place: place.live_run("dev")),
    Refused("status nothing", 2, "there is no run 'nothing'", "0 runs are recorded", "launch status"),
    Refused("status dve", 2, "there is no run 'dve'", "did you mean dev?", "launch status dev",
            done=lambda place: place.live_run("dev")),
]  # fmt: skip


@pytest.mark.parametrize("refused", COMMAND_LINE, ids=str)
def test_g24_what_is_wrong_on_the_command_line_is_2_path_escapes_too(refused: Refused, place: Place) -> None:
    check(refused, place)


# The same run again, with a change: `launch --model tiny`.
CHANGES = [it for it in COMMAND_LINE if it.typed[0] == "-" and re.match("(launch )?--(?!help)", it.hint)]


@pytest.mark.parametrize("refused", CHANGES, ids=str)
def test_n07_a_hint_keeps_the_other_settings_and_the_program_of_the_line(
    refused: Refused, place: Place
) -> None:
    refused.done(place)
    typed = ["--grace", "20s", "--set", "train.keep_checkpoints=7", *refused.typed.split()]
    program = [] if {"--", "up"} & set(typed) else ["--", "true", "--steps=3"]
    done = place.typed(*typed, *program)
    what, _, hint = done.stderr.splitlines()
    assert refused.what in what
    again = shlex.split(hint.removeprefix("Hint: launch "), comments=True)
    own, command = split(again)
    assert readme_commands.parsed(own, command) is not None, "the real command line reads it"
    for kept in ("--grace 20s", "--set train.keep_checkpoints=7", refused.hint.removeprefix("launch ")):
        assert kept in hint
    assert command == (program[1:] or (["true"] if "--" in typed else None))


@pytest.mark.parametrize(
    "option", ["--budget 5", "--max-price 20", "--infra aws", "--disk 100", "--infer-gpus 1"]
)
def test_g11_what_means_something_for_rented_runs_only_is_refused_without_one(
    option: str, place: Place
) -> None:
    name = option.partition(" ")[0]
    check(
        Refused(
            f"{option} -- true",
            2,
            f"{name} needs --gpus",
            "on this computer",
            f"such as --gpus H100:4, or leave out {name}",
        ),
        place,
    )


def test_control_characters_of_what_was_typed_are_shown_as_such(place: Place) -> None:
    done = place.typed("--model", "a\nb\x1b[2J")
    what, _, _ = done.stderr.splitlines()
    assert what == r"Error: no model a\nb\x1b[2J"


# ------------------------------------------------------------------ anything at all

WORDS = st.one_of(
    st.sampled_from(
        ["--model", "--name", "--set", "--port", "--max", "--lease", "--budget", "--wandb", "--env-file", "--gpus", "--infra", "--idle", "--disk", "--dry-run", "plan", "up",
         "--openai-env", "--arbor", "-y", "--json", "--plain", "--debug", "--version", "--", "-h", "status", "logs", "pull", "down",
         "env", "config", "gc", "--older-than", "--which", "dev", "4h", "7d", "1e9", "train.seed=1", "true", "tiny"]
    ),
    st.text(max_size=12),
    st.builds("--set={}={}".format, st.sampled_from(["train.seed", "engine.max_loras", "dtype", "x.y"]), st.text(max_size=8)),
)  # fmt: skip


@pytest.mark.slow
def test_whatever_is_typed_is_never_a_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random words: the exit code is never 1, and an error is always three lines or one object."""
    monkeypatch.setattr("launcher.run.run.Run.execute", lambda self: 0)
    monkeypatch.setattr(preflight, "check_runtime_environment", lambda *_: None)
    monkeypatch.setattr("launcher.teardown.leftovers.find_leftovers", lambda *options: [])
    monkeypatch.setattr("launcher.console.output.Output.claim_stdout", lambda self: None)
    typed = Typed(tmp_path / "project", tmp_path / "home")
    RecordStore(Home.find({"LAUNCH_HOME": str(typed.home)})).create(name="dev")

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(WORDS, max_size=5))
    def try_words(words: list[str]) -> None:
        if "down" in words or any("\0" in word for word in words):
            return
        done = typed(*words)
        assert done.returncode in (0, 2, 3, 4, 8), (words, done.stderr)
        if done.returncode and "--debug" not in words:
            lines = done.stderr.splitlines()
            assert lines[0].startswith("Error: ") and lines[-1].startswith("Hint: "), (words, lines)
            assert all(line.startswith("  ") for line in lines[1:-1]), (words, lines)

    try_words()


# ------------------------------------------------------------------ a process of its own


@pytest.mark.parametrize("words", [["--modle", "x"], ["--", "no-such-program"]])
def test_the_same_from_a_process_of_its_own(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", *words],
        env={**os.environ, "LAUNCH_HOME": str(tmp_path / "home")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (2, 3)
    assert [line.split()[0] for line in done.stderr.splitlines()][::2] == ["Error:", "Hint:"]
    assert done.stdout == "" and not (tmp_path / "home").exists()
