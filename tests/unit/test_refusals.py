"""Bad input, refused before anything starts: what was typed or done → exit code, and the three lines that say
what, why, and what to do. The tables read like the documentation; each line goes through the real entry.
"""

# ruff: noqa: E501 - tables: a line is a case
from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.asking import preflight
from launcher.base import disk
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.cli.main import unsupported
from launcher.ledger.records import RecordStore
from launcher.machines import environments
from launcher.models import known_models
from tests.support.typed import Typed

pytestmark = pytest.mark.process


class Place:
    """A project folder and a home, and what a user may have put there."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = root / "project"
        self.home = root / "home"
        self.typed = Typed(self.folder, self.home)
        self.patch = patch

    def write(self, name: str, text: str, mode: int = 0o600) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def user_config(self, text: str) -> None:
        self.home.mkdir(exist_ok=True)
        (self.home / "config.toml").write_text(text)

    def model(self, **changes: bytes | str | None) -> None:
        """A whole model folder `m`, each change a file's content instead (None: no such file)."""
        files: dict[str, bytes | str | None] = {
            "config.json": '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}',
            "model.safetensors": safetensors(),
            "tokenizer.json": "{}",
            "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
        }
        folder = self.folder / "m"
        folder.mkdir()
        for name, content in {**files, **changes}.items():
            if content is not None:
                (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def live_run(self, name: str) -> None:
        RecordStore(Home.find({"LAUNCH_HOME": str(self.home)})).create(name=name)

    def everything(self) -> set[Path]:
        """All that lies in the home."""
        return set(self.home.rglob("*"))


def safetensors(missing_bytes: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8 - missing_bytes)


@dataclass(frozen=True)
class Refused:
    """One line of a table: `done` is what the user did before, `typed` the words behind `launch`."""

    typed: str
    code: int
    what: str
    why: str
    hint: str
    done: Callable[[Place], None] = lambda place: None
    environ: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.typed


def check(refused: Refused, place: Place) -> None:
    refused.done(place)
    before, children = place.everything(), set(psutil.Process().children())
    done = place.typed(*refused.typed.split(), **refused.environ)
    assert done.returncode == refused.code, done.stderr
    assert done.stdout == ""
    what, why, hint = done.stderr.splitlines()
    assert what.startswith("Error: ") and refused.what in what
    assert why.startswith("  ") and refused.why in why
    assert hint.startswith("Hint: ") and refused.hint in hint
    assert place.everything() == before, "no record, no folder"
    assert set(psutil.Process().children()) <= children, "no process"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    # Whatever is typed here is refused before the network would be asked.
    monkeypatch.setattr(environments, "unreachable", lambda variant: pytest.fail("asked the network"))
    return Place(tmp_path, monkeypatch)


# typed | exit code | what | why | hint
COMMAND_LINE = [
    Refused("--modle x", 2, "no such option: --modle", "did you mean --model?", "launch --help"),
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
    Refused("status -- x", 2, "status runs no program", "takes no program", "launch -- PROGRAM"),
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


@pytest.mark.parametrize(
    "option", ["--budget 5", "--max-price 20", "--infra aws", "--idle 10m", "--disk 100", "--infer-gpus 1"]
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


def test_what_a_file_says_of_rented_runs_waits_for_one(place: Place) -> None:
    place.write("launch.toml", "budget = 5\nidle = '10m'")
    assert place.typed("plan").returncode == 0


@pytest.mark.parametrize(
    ("tools", "missing"), [(("ssh",), "rsync is"), (("rsync",), "ssh is"), ((), "ssh and rsync are")]
)
def test_g11_without_the_programs_that_reach_a_machine_nothing_is_rented(
    tools: tuple[str, ...], missing: str, place: Place, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("true", *tools):
        (tmp_path / "bin" / tool).symlink_to("/bin/true")
    typed = "--gpus H100:4 --infra aws --yes -- true"
    what, why = "launch reaches a rented machine with ssh and rsync", f"{missing} not on this computer"
    check(Refused(typed, 3, what, why, "apt-get install", environ={"PATH": str(tmp_path / "bin")}), place)


@pytest.mark.parametrize("form", ["runtime.py", "runtime/__init__.py", "launcher.py", "launcher/__init__.py"])
@pytest.mark.parametrize("options", ["", "--gpus H100:4 --infra aws --yes "])
def test_g11_a_program_beside_a_name_that_hides_ours_is_refused_first(
    form: str, options: str, place: Place
) -> None:
    place.write("my.py", "")
    place.write(form, "")
    name = form.partition("/")[0]
    hides = f"{place.folder}/{name} hides the package {name.removesuffix('.py')} that comes with launch"
    check(
        Refused(
            f"{options}-- python3 my.py",
            3,
            hides,
            "Python looks in the program's folder first",
            f"mv {place.folder}/{name}",
        ),
        place,
    )


PROGRAMS = [
    Refused("--", 2, "no program after --", "the program to run goes after --", "launch -- python my.py"),
    Refused("-- no-such-program", 3, "cannot run no-such-program", "no such program on PATH", "which no-such"),
    Refused("-- ./none", 3, "cannot run ./none", "no such file", "ls ."),
    Refused("-- lib", 3, "cannot run lib", "it is a folder", "ls lib",
            done=lambda place: place.write("lib/x.py", "")),
    Refused("-- x.py --steps 3", 3, "cannot run x.py", "in this folder, but not on PATH",
            "launch -- python x.py --steps 3", done=lambda place: place.write("x.py", "")),
    Refused("-- ./x.py", 3, "cannot run ./x.py", "is not executable", "launch -- python ./x.py",
            done=lambda place: place.write("x.py", "")),
    Refused("-- ./x.sh", 3, "cannot run ./x.sh", "is not executable", "chmod +x ./x.sh",
            done=lambda place: place.write("x.sh", "#!/bin/sh\n")),
    Refused("-- ./x", 3, "cannot run ./x", "names /no/perl, which does not exist", "head -1",
            done=lambda place: place.write("x", "#!/no/perl -w\n", 0o700)),
    Refused("-- python3 train.py", 3, "cannot run train.py", "no such file in", "ls *.py"),
    Refused("python x.py --steps 3", 2, "python is not a verb", "after --", "launch -- python x.py --steps 3"),
]  # fmt: skip


@pytest.mark.parametrize("refused", PROGRAMS, ids=str)
def test_a_program_that_cannot_run_is_found_first(refused: Refused, place: Place) -> None:
    check(refused, place)


def test_a_folder_that_is_gone_is_said(place: Place) -> None:
    gone = place.folder / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", f"rmdir {gone}; exec {sys.executable} -m launcher.cli.main -- true"],
        cwd=gone,
        env={
            **os.environ,
            "LAUNCH_HOME": str(place.home),
            "PYTHONPATH": str(Path(preflight.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "Error: this folder is gone"


def test_control_characters_of_what_was_typed_are_shown_as_such(place: Place) -> None:
    done = place.typed("--model", "a\nb\x1b[2J")
    what, _, _ = done.stderr.splitlines()
    assert what == r"Error: no model a\nb\x1b[2J"


def test_an_empty_word_is_no_program(place: Place) -> None:
    done = place.typed("--", "")
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "Error: cannot run an empty command"


FILES = [
    Refused("", 3, "launch.toml: lerning_rate: no such", "did you mean train.learning_rate?", "launch.toml: train",
            done=lambda place: place.write("launch.toml", "lerning_rate = 1")),
    Refused("", 3, "launch.toml: 'no' is not valid", "90s, 15m, 4h", "launch --help",
            done=lambda place: place.write("launch.toml", "max = 'no'")),
    Refused("", 3, "launch.toml: train.lora.rank: 'many' is not valid", "a whole number from 1", "launch config",
            done=lambda place: place.write("launch.toml", "[train.lora]\nrank = 'many'")),
    Refused("", 3, "launch.toml cannot be read", "Invalid value", "correct",
            done=lambda place: place.write("launch.toml", "model = ")),
    Refused("", 3, "launch.toml cannot be read", "Is a directory", "ls -l",
            done=lambda place: (place.folder / "launch.toml").mkdir()),
    Refused("", 3, "config.toml: modle: no such setting", "did you mean model?", "config.toml: model",
            done=lambda place: place.user_config("modle = 'x'")),
    Refused("", 3, "LAUNCH_BUDGET: 'lots' is not valid", "US dollars", "launch --help",
            environ={"LAUNCH_BUDGET": "lots"}),
    Refused("", 3, "LAUNCH_MODELS in the environment: no such setting", "LAUNCH_MODEL", "export LAUNCH_MODEL=",
            environ={"LAUNCH_MODELS": "x"}),
    Refused("", 3, ".env: line 3 cannot be read", "NAME=value", "sed -n 3p",
            done=lambda place: place.write(".env", "A=1\n\nHF_TOKEN hf_not_to_be_shown\n")),
    Refused("", 3, ".env: line 1 cannot be read", "NAME=value", "sed -n 1p",
            done=lambda place: place.write(".env", "HF_TOKEN\n")),
    Refused("", 3, ".env: line 2 cannot be read", "NAME=value", "sed -n 2p",
            done=lambda place: place.write(".env", "A=1\nHF_TOKEN='no end\n")),
    Refused("", 3, ".env: LAUNCH_LEASE: '1' is not valid", "90s, 15m, 4h", "launch --help",
            done=lambda place: place.write(".env", "LAUNCH_LEASE=1\n")),
    Refused("--env-file none", 3, "no file none", "named by --env-file", "ls -l none"),
    Refused("--env-file .", 3, ". cannot be read", "Is a directory", "ls -ld"),
    Refused("", 3, "cannot write under", "is not a folder", "set LAUNCH_HOME",
            done=lambda place: place.home.write_text("")),
    Refused("", 3, "config.toml cannot be read", "name too long", "ls -l", environ={"LAUNCH_HOME": "/tmp/" + "x" * 300}),
    Refused("", 3, "cannot write under", "read-only disk", "set LAUNCH_HOME",
            done=lambda place: place.patch.setattr(os, "ST_RDONLY", ~0)),
    Refused("--wandb online", 3, "--wandb online: no account", "WANDB_API_KEY", "launch --wandb offline",
            environ={"HOME": "/nowhere", "WANDB_API_KEY": "", "NETRC": ""}),
]  # fmt: skip


@pytest.mark.parametrize("refused", FILES, ids=lambda refused: refused.what)
def test_what_is_wrong_in_a_file_or_the_environment_is_3(refused: Refused, place: Place) -> None:
    check(refused, place)
    assert "not_to_be_shown" not in place.typed(*refused.typed.split(), **refused.environ).stderr


INDEX = "model.safetensors.index.json"
MODELS = [
    Refused("--model ./nothing", 3, "no model ./nothing", "no such folder", "launch --model Qwen/"),
    Refused("--model /nowhere/at/all", 3, "no model /nowhere/at/all", "no such folder", "launch --model Qwen/"),
    Refused("--model gpt", 3, "no model gpt", "not a hub name (owner/name)", "launch --model Qwen/"),
    Refused("--model f", 3, "no model f", "it is a file, not a folder", "launch --model",
            done=lambda place: place.write("f", "")),
    Refused("--model m", 3, "the model m cannot be used", "no config.json", "ls -l",
            done=lambda place: place.model(**{"config.json": None})),
    Refused("--model m", 3, "the model m cannot be used", "config.json is damaged", "download the model again",
            done=lambda place: place.model(**{"config.json": "{"})),
    Refused("--model m", 3, "the model m cannot be used", "config.json is damaged: it is not a JSON object", "again",
            done=lambda place: place.model(**{"config.json": "[]"})),
    Refused("--model m", 3, "the model m cannot be used", "passes a state along its tokens", "--model Qwen/",
            done=lambda place: place.model(
                **{"config.json": '{"architectures": ["MambaForCausalLM"], "state_size": 16}'})),
    Refused("--model m", 3, "the model m cannot be used", "no *.safetensors", "ls -l",
            done=lambda place: place.model(**{"model.safetensors": None, "model.bin": "x"})),
    Refused("--model m", 3, "the model m cannot be used", "cut short: ", "download the model again",
            done=lambda place: place.model(**{"model.safetensors": safetensors(1)})),
    Refused("--model m", 3, "the model m cannot be used", "not a safetensors file, or cut short", "again",
            done=lambda place: place.model(**{"model.safetensors": b"no"})),
    Refused("--model m", 3, "the model m cannot be used", "its header is damaged", "download the model again",
            done=lambda place: place.model(**{"model.safetensors": b"\2" + bytes(7) + b"xx"})),
    Refused("--model m", 3, "the model m cannot be used", "2.safetensors: listed in the index, but missing", "again",
            done=lambda place: place.model(**{INDEX: '{"weight_map": {"w": "2.safetensors"}}'})),
    Refused("--model m", 3, "the model m cannot be used", "no weight_map", "download the model again",
            done=lambda place: place.model(**{INDEX: "{}"})),
    Refused("--model m", 3, "the model m cannot be used", "names files outside its folder", "ls -l",
            done=lambda place: place.model(**{INDEX: '{"weight_map": {"w": "../x.safetensors"}}'})),
    Refused("--model m", 3, "the model m cannot be used", "no tokenizer", "ls -l",
            done=lambda place: place.model(**{"tokenizer.json": None})),
    Refused("--model m", 3, "the model m cannot be used", "tokenizer.json is damaged", "download the model again",
            done=lambda place: place.model(**{"tokenizer.json": "{"})),
    Refused("--model m", 3, "the model m cannot be used", "no chat template", "an instruct model",
            done=lambda place: place.model(**{"tokenizer_config.json": "{}"})),
]  # fmt: skip


@pytest.mark.parametrize("refused", MODELS, ids=lambda refused: refused.why)
def test_a_model_that_cannot_be_served_or_trained_is_3(refused: Refused, place: Place) -> None:
    check(refused, place)


# ------------------------------------------------------------------ this computer


def test_g31_a_taken_port_is_3_and_says_who_holds_it_without_asking_for_everybodys_connections(
    place: Place,
) -> None:
    """Which takes root on a Mac."""

    def as_on_a_mac(*_kind: str) -> list[object]:
        raise psutil.AccessDenied

    place.patch.setattr(psutil, "net_connections", as_on_a_mac)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        holder = f"(pid {os.getpid()}) uses it"
        check(Refused(f"--port {port}", 3, f"port {port} is taken", holder, "without --port"), place)
        place.live_run("dev")
        store = RecordStore(Home.find({"LAUNCH_HOME": str(place.home)}))
        store.update(store.load("dev").id, url=f"http://127.0.0.1:{port}")
        check(Refused(f"--port {port}", 3, "is taken", "the run dev uses it", "without --port"), place)


def test_a_disk_too_full_for_the_environment_is_3(place: Place) -> None:
    place.patch.setattr(disk, "free_bytes", lambda folder: 3 * 10**9)
    check(
        Refused("", 3, "the runtime's environment needs 8.0 GB of disk", "3.0 GB are free at", "LAUNCH_HOME"),
        place,
    )


def test_a_disk_too_full_for_the_checkpoints_is_3(place: Place) -> None:
    """Checkpoints of the chosen rank, times those that are kept."""
    place.patch.setattr(disk, "free_bytes", lambda folder: 10**9)
    small = Refused("--set train.lora.rank=8", 3, "environment needs", "1.0 GB are free", "free some space")
    check(small, place)
    typed = "--set train.lora.rank=256 --set train.keep_checkpoints=30"
    check(Refused(typed, 3, "a run with 30 checkpoints needs 1.", "1.0 GB are free", "LAUNCH_HOME"), place)


def test_the_size_of_a_checkpoint_is_that_of_a_real_one() -> None:
    """A rank-16 step of Qwen2.5-0.5B: 8.8 M adapter weights, each with two moments, in float32."""
    from launcher.models.model_folder import checkpoint_bytes
    from runtime.shared.model_shape import shape

    found = shape(
        {
            "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936,
        }
    )  # fmt: skip
    assert found is not None
    assert checkpoint_bytes(found, 16) == 8_798_208 * 12


def test_no_network_is_3_while_the_environment_is_not_built(place: Place, tmp_path: Path) -> None:
    place.patch.undo()
    place.patch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: a connection is refused at once
        for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
            place.patch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}/simple")
        for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
            place.patch.delenv(name, raising=False)
        place.patch.setenv("UV_NO_CONFIG", "1")
        what = "the runtime's environment is not built, and its packages cannot be downloaded"
        check(Refused("", 3, what, "fetch", "once the environment is built, launch works offline"), place)


@pytest.mark.parametrize(
    ("python", "platform", "what", "hint"),
    [
        (
            (3, 10),
            "linux",
            "launch needs Python 3.11 or newer, this is 3.10",
            "uv tool install --python 3.12",
        ),
        ((3, 12), "win32", "launch does not run on Windows", "wsl --install"),
    ],
)
def test_a_computer_that_cannot_run_launch_is_told(python, platform, what: str, hint: str) -> None:
    refusal = unsupported(python, platform)
    assert refusal is not None and refusal.exit_code == 3
    assert refusal.message == what
    assert hint in (refusal.hint or "")
    assert unsupported((3, 11), "linux") is None and unsupported((3, 14), "darwin") is None


def test_an_old_python_gets_as_far_as_the_refusal() -> None:
    """What is imported before it must be readable for Pythons before 3.11."""
    import ast

    import launcher.base.errors
    import launcher.cli.main

    for module in (launcher, launcher.cli, launcher.cli.main, launcher.base, launcher.base.errors):
        ast.parse(Path(str(module.__file__)).read_text(), feature_version=(3, 8))


def test_a_run_here_needs_linux_and_the_verbs_do_not(place: Place) -> None:
    place.patch.setattr(sys, "platform", "darwin")
    check(Refused("", 3, "needs Linux, this is macOS", "needs a Linux feature", "container"), place)
    assert place.typed("status").returncode == 0


def test_a_long_home_is_fine_because_sockets_lie_elsewhere(place: Place) -> None:
    from launcher.machines.local import LocalMachine

    home = Home.find({"LAUNCH_HOME": str(place.home / ("long" * 30))})
    preflight.check_folders(home)
    machine = LocalMachine("slip-01234567", home.run_folder("slip-01234567") / "machine", home.environments)
    assert len(f"{machine.socket_dir}/engine-00.sock") < 104


def test_an_env_file_that_others_can_read_is_a_warning_and_no_error(place: Place) -> None:
    from launcher.asking.setting_sources import load

    for text, mode, warned in [
        ("HF_TOKEN=hf_0123456789\n", 0o644, True),
        ("HF_TOKEN=hf_0123456789\n", 0o600, False),
        ("LAUNCH_LEASE=5m\nHF_TOKEN=\n", 0o644, False),
    ]:
        place.write(".env", text, mode)
        home = Home.find({"LAUNCH_HOME": str(place.home)})
        warnings = load({}, environ={}, folder=place.folder, home=home).warnings
        assert warnings == (
            (f".env holds secrets and other users can read it: chmod 600 {place.folder}/.env",)
            if warned
            else ()
        )


# ------------------------------------------------------------------ the hub


@dataclass
class Hub:
    """A model hub on loopback; answers every question alike and remembers who asked."""

    status: int = 200
    body: bytes = b'{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}'
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def hub(place: Place) -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(hub.status)
            self.send_header("Content-Length", str(len(hub.body)))
            self.end_headers()
            self.wfile.write(hub.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        place.patch.delenv(name, raising=False)
    place.patch.setenv("HF_ENDPOINT", hub.url)
    place.patch.setenv("HF_HOME", str(place.folder / "hf"))
    yield hub
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "token", "what", "why"),
    [
        (404, b"", None, "no model some/model", "no such model"),
        (401, b"", None, "cannot be downloaded", "it is gated and HF_TOKEN is not set"),
        (403, b"", "hf_0123456789", "cannot be downloaded", "the HF_TOKEN account has no access"),
        (500, b"", None, "cannot be looked up", "answered 500"),
        (200, b"<html>", None, "cannot be used", "its config.json is not JSON"),
        (
            200,
            b'{"architectures": ["BertModel"]}',
            None,
            "cannot be used",
            "BertModel is no causal language model",
        ),
    ],
)
def test_a_model_of_the_hub_is_looked_at(hub: Hub, place: Place, status, body, token, what, why) -> None:
    hub.status, hub.body = status, body
    if token:
        place.write(".env", f"HF_TOKEN={token}\n")
    check(Refused("--model some/model", 3, what, why, ""), place)
    assert hub.asked == [("/some/model/resolve/main/config.json", token and f"Bearer {token}")]


@pytest.mark.parametrize("model", ["a b/c", "a\tb/c", "ä/b", "a/b?c#d"])
def test_a_name_that_no_address_may_hold_is_asked_for_all_the_same(hub: Hub, model: str) -> None:
    from launcher.models import hub as the_hub
    from launcher.models import model_config, model_size

    hub.status = 404
    assert model_config.of(model, os.environ) is None
    assert model_size.of(model, os.environ) is None
    with pytest.raises(PreflightError) as refused:
        the_hub.check(model, os.environ, None)
    assert refused.value.message == f"no model {model}"
    assert all(unquote(path.split("?blobs")[0]).count(model) for path, _ in hub.asked)


def test_a_name_that_is_nearly_a_known_one_is_asked_back(hub: Hub, place: Place) -> None:
    for hub.status in (404, 401):
        why = "did you mean Qwen/Qwen3-1.7B?"
        check(
            Refused("--model Qwen/Qwen3-1.7", 3, "Qwen/Qwen3-1.7", why, "launch --model Qwen/Qwen3-1.7B"),
            place,
        )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen/Qwen3-1.7", "Qwen/Qwen3-1.7B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-Instrct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen/qwen3-8b", None),
        ("Qwen/Qwen3-2B", None),
        ("Qwen/Qwen2.5-72B-Instruct", None),
        ("gpt", None),
    ],
)
def test_a_model_of_another_size_is_not_what_was_meant(typed: str, meant: str | None) -> None:
    assert known_models.suggestion(typed) == meant


def test_a_disk_too_full_for_the_download_is_3(hub: Hub, place: Place) -> None:
    sizes = [("model.safetensors", 3 * 10**9), ("model.bin", 9 * 10**9), ("config.json", None)]
    siblings = [{"rfilename": name, "size": size or 10**3} for name, size in sizes]
    hub.body = json.dumps({"architectures": ["Qwen2ForCausalLM"], "siblings": siblings}).encode()
    place.patch.setattr(disk, "free_bytes", lambda folder: 2 * 10**9)
    what = "the model some/model needs 3.0 GB of disk"
    check(Refused("--model some/model", 3, what, "2.0 GB are free", "HF_HOME"), place)


def test_a_hub_that_does_not_answer_is_3(hub: Hub, place: Place) -> None:
    place.patch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    what = "the model some/model is not on this computer and cannot be looked up"
    check(Refused("--model some/model", 3, what, "refused", "or --model FOLDER"), place)
    place.patch.setenv("HF_HUB_OFFLINE", "1")
    check(
        Refused("--model some/model", 3, "not on this computer", "HF_HUB_OFFLINE is set", "--model FOLDER"),
        place,
    )


def test_a_context_longer_than_the_models_is_3(place: Place) -> None:
    words = "--set engine.max_model_len=1025"
    check(Refused(words, 3, "the context cannot be 1025 tokens", "has 1024 tokens", "set it lower"), place)


def test_a_downloaded_model_is_looked_at_without_the_network(hub: Hub, place: Place) -> None:
    snapshot = place.folder / "hf" / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    assert preflight.find_model("some/model") == "some/model"
    assert hub.asked == []


# ------------------------------------------------------------------ anything at all

WORDS = st.one_of(
    st.sampled_from(
        ["--model", "--name", "--set", "--port", "--max", "--lease", "--budget", "--wandb", "--env-file", "--gpus", "--infra", "--idle", "--disk", "--dry-run", "plan",
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
    monkeypatch.setattr(preflight, "check_environment", lambda *_: None)
    monkeypatch.setattr("launcher.safety.leftovers.look", lambda *options: [])
    monkeypatch.setattr("launcher.screen.output.Output.claim_stdout", lambda self: None)
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
