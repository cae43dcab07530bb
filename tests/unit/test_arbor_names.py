"""Arbor's names for a program: what each gives, and that none of them ends a run (A2, A3)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.client import NotConnected, Refused, arbor
from launcher.client.arbor import jobs
from launcher.client.arbor.jobs import Job
from tests.support.arbor_names import unused
from tests.support.small_run import SmallRun
from tests.support.waiting import wait_until

__all__ = ["unused"]

ROOT = Path(__file__).resolve().parents[2]
ON_PATH = ROOT / "launcher" / "client" / "arbor" / "on_path"
KEYS = {"host", "port", "storage_path", "config_path", "base_url"}


@pytest.fixture(autouse=True)
def at_home(unused: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without any file of Arbor's."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def _python(code: str, *paths: Path, run: SmallRun | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCH_") or run}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)


# ------------------------------------------------------------------ A2


@pytest.mark.process
def test_a02_import_arbor_is_ours_with_no_line_changed(run: SmallRun) -> None:
    done = _python(
        "import sys, arbor; print(arbor.__file__, arbor.__version__, arbor.init(silent=True)['base_url'])\n"
        "assert 'dspy' not in sys.modules and 'torch' not in sys.modules\n"
        "from arbor import *\n"
        "from arbor import ArborGRPO, ArborProvider; print(ArborGRPO.__module__, ArborProvider.__module__)\n"
        "assert init() == start() == arbor.status() and get_client and watch_job",
        ON_PATH,
        run=run,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{ON_PATH / 'arbor' / '__init__.py'} 0.2.17+slipway {run.base_url}/"
    assert second == "launcher.client.arbor.optimizer launcher.client.arbor.arbor_provider"
    assert not done.stderr


@pytest.mark.process
@pytest.mark.parametrize("first", ["", "import dspy; "])
def test_s08_names_that_arbors_scripts_import_from_dspy_and_peft_are_there(first: str) -> None:
    done = _python(
        f"{first}import sys, arbor\n"
        f"assert {bool(first)} or 'dspy' not in sys.modules\n"
        "from dspy.teleprompt import ArborGRPO, BootstrapFewShot\n"
        "from peft import LoraConfig\n"
        "assert ArborGRPO is arbor.ArborGRPO\n"
        "print(vars(LoraConfig(r=16, lora_alpha=32, target_modules='all-linear')), LoraConfig().r)\n"
        "import importlib, dspy; importlib.reload(arbor); assert not hasattr(dspy.teleprompt, 'No')",
        ON_PATH,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'r': 16, 'lora_alpha': 32, 'target_modules': 'all-linear'} 8\n"
    assert done.stderr.count("PEFT is not installed") == 1


@pytest.mark.process
def test_s08_an_installed_peft_is_used(tmp_path: Path) -> None:
    (tmp_path / "peft.py").write_text("LoraConfig = 'the real one'\n")
    done = _python("import arbor; from peft import LoraConfig; print(LoraConfig)", ON_PATH, tmp_path)
    assert (done.stdout, done.stderr) == ("the real one\n", "")


@pytest.mark.process
def test_a02_with_the_real_arbor_installed_ours_wins_and_it_is_said_once(tmp_path: Path) -> None:
    real = tmp_path / "site" / "arbor" / "__init__.py"
    real.parent.mkdir(parents=True)
    real.write_text("raise ImportError('No module named uvicorn')\n")
    done = _python("import arbor, importlib; importlib.reload(arbor)", ON_PATH, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("arbor:") == 1 and str(real) in done.stderr


def test_every_name_of_arbors_is_there() -> None:
    for name in arbor.__all__:
        assert getattr(arbor, name) is not None
    assert arbor.__version__.endswith("+slipway")
    with pytest.raises(AttributeError):
        _ = arbor.no_such_name


# ------------------------------------------------------------------ A3


@pytest.mark.parametrize("begin", [arbor.init, arbor.start, arbor.start_server])
def test_a03_each_of_the_three_gives_exactly_arbors_keys(begin, run: SmallRun, tmp_path: Path) -> None:
    found = begin()
    assert set(found) == KEYS
    assert found["base_url"] == f"{run.base_url}/" and found["base_url"].endswith("/v1/")
    assert (found["host"], found["port"]) == ("127.0.0.1", int(run.base_url.split(":")[2].split("/")[0]))
    assert (found["storage_path"], found["config_path"]) == (str(tmp_path), None)


def test_a03_a_second_call_gives_the_same_and_nobody_can_change_it(run: SmallRun) -> None:
    first = arbor.init()
    first["port"] = 1
    assert arbor.init() == arbor.start() == arbor.status() != first


def test_a03_outside_a_run_the_error_has_the_line_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCH_BASE_URL", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "my train.py", "--seed", "1"])
    with pytest.raises(NotConnected) as raised:
        arbor.init()
    assert raised.value.hint == "launch --arbor -- python 'my train.py' --seed 1"
    assert shlex.split(raised.value.hint)[4] == "my train.py"
    assert arbor.status() is None


def test_a03_in_a_notebook_it_is_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCH_BASE_URL", raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with pytest.raises(NotConnected) as raised:
        arbor.init()
    assert (raised.value.hint or "").startswith("launch --arbor --name dev  #")


def test_a03_what_the_run_decides_is_said_and_silence_is_kept(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    arbor.init(silent=True)
    assert not capsys.readouterr().err
    for _ in range(2):
        arbor.init(host="0.0.0.0", port=1, storage_path="/somewhere", accelerate_config="a.yaml")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "only on this computer" in said[0] and "/somewhere" in said[1] and "accelerate_config" in said[2]


def test_arbors_own_configuration_is_read_with_one_note(
    run: SmallRun, at_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = at_home / ".arbor" / "config.yaml"
    config.parent.mkdir()
    config.write_text("# mine\nstorage_path: '/data/arbor'  # large\n")
    found = arbor.init(silent=True)
    arbor.init(silent=True)
    assert found["config_path"] == str(config) and found["storage_path"] == str(tmp_path)
    said = capsys.readouterr().err
    assert said.count("/data/arbor") == 1 and str(tmp_path) in said


def test_a03_status_is_the_same_dict_or_none(run: SmallRun) -> None:
    assert arbor.status() is None
    assert arbor.init() == arbor.status()


@pytest.mark.parametrize("end", [arbor.shutdown, arbor.stop])
def test_a03_shutdown_ends_nothing_and_says_how(
    end, run: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCH_RUN_ID", "slip-0a1b2c3d")
    end()
    assert "nothing to shut down" in capsys.readouterr().err
    arbor.init(silent=True)
    asked = len(run.posted)
    end()
    assert "launch down slip-0a1b2c3d" in capsys.readouterr().err
    assert arbor.status() is None
    assert len(run.posted) == asked, "it asks the run for nothing"
    assert arbor.init(silent=True)["base_url"] == f"{run.base_url}/"


@pytest.mark.process
def test_a03_the_client_is_openais_and_lists_the_models(run: SmallRun) -> None:
    with arbor.get_client() as client:
        assert [it.id for it in client.models.list()] == ["policy", "base"]
        answer = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hello"}]
        )
    assert "bonjour" in answer.choices[0].message.content


def test_a03_without_openai_the_client_says_what_to_install(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match="pip install openai"):
        arbor.get_client()


def test_start_server_is_told_which_model_the_run_has(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (run.hub_name, f"openai/arbor:{run.hub_name}"):
        arbor.start_server(name)
    assert capsys.readouterr().err.count("old name") == 1
    with pytest.raises(Refused) as raised:
        arbor.start_server("meta-llama/Llama-3.2-3B-Instruct")
    assert run.hub_name in str(raised.value)
    hint = raised.value.hint or ""
    assert hint.startswith("launch --arbor --model meta-llama/Llama-3.2-3B-Instruct -- python ")


# ------------------------------------------------------------------ jobs

STEP = {"kind": "step", "step": 1, "reward": 0.5, "counts": {"trained": 8, "samples": 8}, "version": 1}
VALIDATION = {"kind": "validation", "step": 1, "score": 0.25}


def test_a03_watch_job_follows_the_steps_until_the_job_ends(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    history: list[dict] = []
    job = Job("a1b2", 1, history)
    jobs.add(job)
    watching = threading.Thread(target=arbor.watch_job, args=("a1b2", 60, 0.05))
    watching.start()
    history += [STEP, VALIDATION]
    job.is_over.set()
    watching.join(30)
    assert not watching.is_alive()
    said = capsys.readouterr().out
    assert said.count("step 1: reward 0.500, trained 8 of 8 samples, version 1") == 1
    assert "validation after 1 steps: score 0.250" in said
    assert said.splitlines()[-1] == "job a1b2: succeeded"


def test_a03_watch_job_ends_by_its_own_time_and_knows_its_jobs(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.add(Job("a1b2", 1, [STEP]))
    arbor.watch_job("a1b2", max_time=0, show_logs=False)
    said = capsys.readouterr().out
    assert "step 1" not in said and "not watched any longer" in said
    with pytest.raises(ValueError, match="a1b2"):
        arbor.watch_job("unknown")


def test_a03_a_job_of_another_program_is_followed_by_the_runs_journal(
    run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"kind": "compile", "steps": 1}, STEP | {"reward": None}, VALIDATION]
    text = "".join(json.dumps({**it, "compile": "c9"}) + "\n" for it in lines)
    (tmp_path / "grpo.jsonl").write_text(text + json.dumps(STEP | {"compile": "other"}) + '\n{"kind": "st')
    arbor.watch_job("c9")
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0].startswith("  step 1: reward unknown") and said[-1] == "job c9: succeeded" and len(said) == 3
    )
    with pytest.raises(ValueError, match="another program"):
        arbor.shutdown_job("c9")


def test_a03_shutdown_job_stops_that_job_and_asks_the_run_for_nothing(run: SmallRun) -> None:
    arbor.init(silent=True)
    job, other = Job("a1b2", 3), Job("c3d4", 3)
    jobs.add(job)
    jobs.add(other)
    asked = len(run.posted)
    assert arbor.shutdown_job("a1b2") == {"type": "training_job", "status": "cancelled", "job_id": "a1b2"}
    assert job.is_cancelled.is_set() and not other.is_cancelled.is_set()
    other.is_over.set()
    assert arbor.shutdown_job("c3d4")["status"] == "succeeded", "it had ended"
    assert len(run.posted) == asked
    assert arbor.shutdown_job(run.hub_name)["status"] == "running", "a model stays served"
    assert {path.rpartition("/jobs/")[0] for path, _ in run.posted[asked:]} == {"/v1/fine_tuning"}


def test_a03_a_job_of_openais_sdk_is_followed_and_ended_by_its_id(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [{"id": "e2", "message": "Step 1: loss 0.50"}, {"id": "e1", "message": "begun"}]
    run.tuned["ftjob-1"] = ({"id": "ftjob-1", "status": "running"}, events)
    arbor.watch_job("ftjob-1", max_time=0.1, update_interval=0.05)
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["  begun", "  Step 1: loss 0.50", "job ftjob-1: running"]
    assert len(said) == 4, "each event once"
    assert arbor.shutdown_job("ftjob-1")["status"] == "cancelled"
    arbor.watch_job("ftjob-1")
    assert capsys.readouterr().out.splitlines()[-1] == "job ftjob-1: cancelled"


@pytest.mark.process
def test_a03_a_program_that_ends_leaves_the_run_alone(run: SmallRun) -> None:
    done = _python(
        "from launcher.client import arbor\n"
        "arbor.init(); arbor.start(); arbor.get_client(); arbor.start_server(); arbor.stop(); arbor.init()\n",
        ROOT,
        run=run,
    )
    assert done.returncode == 0, done.stderr
    wait_until(lambda: len(run.posted) >= 1, 10.0, "it asked something")
    assert {path for path, _ in run.posted} == {"/slipway/status"}
