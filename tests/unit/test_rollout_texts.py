"""launcher/results/rollout_texts.py: what was said comes home, within bounds and without secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.base.log import REDACTOR
from launcher.results import results_copy, rollout_texts
from runtime.shared import redaction
from tests.support.committed import commit

KNOWN = 'pass"word\\of-the-user-é'
SHAPED = "hf_abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "machine"
    (folder / "logs" / "rollouts").mkdir(parents=True)
    return folder


def write(state_dir: Path, step: int, *lines: dict[str, Any]) -> Path:
    path = state_dir / "logs" / "rollouts" / f"step-{step:06d}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def at_home(results: Path, step: int) -> list[dict[str, Any]]:
    text = (results / "rollouts" / f"step-{step:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_g22_what_was_said_is_home_with_each_durable_step(state_dir: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    line = {"step": 1, "rollout": "r", "reward": 0.5, "completion": "bonjour"}
    for step in (1, 2):
        write(state_dir, step, line | {"step": step})
        commit(state_dir, step)
        results_copy.make_durable(state_dir, results)
        assert at_home(results, step) == [line | {"step": step}]
    report = results_copy.pull(state_dir, results)
    assert not report.skipped
    again = results / "rollouts" / "step-000001.jsonl"
    before = again.stat().st_ino
    results_copy.pull(state_dir, results)
    assert again.stat().st_ino == before, "what is at home is not brought again"
    assert again.stat().st_mode & 0o077 == 0 or (results / "rollouts").stat().st_mode & 0o077 == 0

    os.utime(write(state_dir, 2, line | {"reward": 0.25}), ns=(7, 7))  # a rewound run takes the step again
    results_copy.pull(state_dir, results)
    assert at_home(results, 2)[0]["reward"] == 0.25


def test_g22_texts_of_an_empty_step_and_of_a_validation_do_not_wait_for_the_next_commit(
    state_dir: Path, tmp_path: Path
) -> None:
    """A run whose steps are all empty commits nothing, and is the one that people look at."""
    results = tmp_path / "results"
    watcher = results_copy.DurableWatcher(state_dir)
    write(state_dir, 1, {"step": 1})
    commit(state_dir, 1)
    watcher.look(results)
    told = []
    for name in ("empty-000001-01.jsonl", "validation-000001-score.jsonl"):
        (state_dir / "logs" / "rollouts" / name).write_text('{"reward": 0}\n')
        watcher.look(results)
        told.append(name)
        assert {path.name for path in (results / "rollouts").iterdir()} == {"step-000001.jsonl", *told}
    before = {path: path.stat().st_ino for path in (results / "rollouts").iterdir()}
    watcher.look(results)
    assert {path: path.stat().st_ino for path in before} == before


def test_g22_texts_of_steps_that_went_with_a_machine_go_too(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    kept = ["step-000002.jsonl", "validation-000002-score.jsonl", "empty-000001-01.jsonl", "notes.txt"]
    lost = ["step-000003.jsonl", "validation-000003-score.jsonl", "empty-000002-01.jsonl"]
    for name in (*kept, *lost):
        (folder / name).write_text("{}\n")
    rollout_texts.drop_after(folder, 2)
    assert {path.name for path in folder.iterdir()} == set(kept)
    rollout_texts.drop_after(tmp_path / "nothing", 2)


def test_g14_secrets_in_what_was_said_stay_where_they_are(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(REDACTOR, "_secrets", set())
    REDACTOR.hide([KNOWN])
    tools = [{"said": f"token {SHAPED}."}]
    write(state_dir, 1, {"prompt": f"log in with {KNOWN}", "tools": tools, "reward": 1.0})
    results_copy.pull(state_dir, tmp_path / "results")
    assert at_home(tmp_path / "results", 1) == [
        {"prompt": "log in with ***", "tools": [{"said": "token ***."}], "reward": 1.0}
    ]
    offline = state_dir / "logs" / "wandb" / "offline-run-20261122_100000-slip"
    (offline / "files").mkdir(parents=True)
    (offline / "files" / "output.log").write_text("nothing")
    (offline / "run-slip.wandb").write_bytes(b"\0\1" + KNOWN.encode("latin-1"))
    report = results_copy.pull(state_dir, tmp_path / "results")
    home = (tmp_path / "results" / "wandb").rglob("*")
    assert [path.name for path in home if path.is_file()] == ["output.log"]
    assert any("it holds a secret" in line for line in report.skipped)


def test_g22_wandbs_offline_runs_come_home_byte_for_byte(state_dir: Path, tmp_path: Path) -> None:
    wandb = state_dir / "logs" / "wandb"
    offline = wandb / "offline-run-20261122_100000-slip"
    (offline / "files").mkdir(parents=True)
    (offline / "run-slip.wandb").write_bytes(bytes(range(256)) * 10)
    (offline / "files" / "config.yaml").write_text("lr: 1\n")
    (wandb / "latest-run").symlink_to(offline)
    (offline / "files" / "outside").symlink_to(tmp_path)
    (offline / "files" / "debug-core.log").symlink_to(tmp_path / "core.log")
    (wandb / "run-20261122_100000-online").mkdir()
    report = results_copy.pull(state_dir, tmp_path / "results")

    home = tmp_path / "results" / "wandb"
    assert sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()) == [
        f"{offline.name}/files/config.yaml", f"{offline.name}/run-slip.wandb",
    ]  # fmt: skip
    assert (home / offline.name / "run-slip.wandb").read_bytes() == bytes(range(256)) * 10
    assert report.skipped == (f"wandb/{offline.name}/files/outside: outside is a symbolic link",)


@pytest.mark.parametrize("what", ["link", "folder link", "name", "damage", "length"])
def test_g24_what_a_machine_put_in_their_place_is_not_brought(
    state_dir: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-000001.jsonl").write_text('{"secret": 1}\n')
    rollouts = state_dir / "logs" / "rollouts"
    if what == "link":
        (rollouts / "step-000001.jsonl").symlink_to(outside / "step-000001.jsonl")
    elif what == "folder link":
        rollouts.rmdir()
        rollouts.symlink_to(outside)
    elif what == "name":
        (rollouts / "step-1.jsonl").write_text("{}\n")
        (rollouts / "other.txt").write_text("{}\n")
    elif what == "damage":
        (rollouts / "step-000001.jsonl").write_text('{"a": 1}\n[1]\n{"a"\n' + "[" * 100_000 + "\n")
    else:
        monkeypatch.setattr(rollout_texts, "_STEP_BYTES", 100)
        (rollouts / "step-000001.jsonl").write_text('{"a": 1}\n' * 100)
    report = results_copy.pull(state_dir, tmp_path / "results")

    home = tmp_path / "results" / "rollouts"
    assert sorted(path.name for path in home.glob("*")) == (["step-000001.jsonl"] if what == "damage" else [])
    assert bool(report.skipped) == (what in ("link", "length")), report.skipped
    if what == "damage":
        assert at_home(tmp_path / "results", 1) == [{"a": 1}]


def test_g22_at_home_too_the_oldest_go_first(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_texts, "TOTAL_BYTES", 250)
    for step in (1, 2, 3):
        write(state_dir, step, {"completion": "x" * 80})
    results_copy.pull(state_dir, tmp_path / "results")
    home = sorted(path.name for path in (tmp_path / "results" / "rollouts").iterdir())
    assert home == ["step-000002.jsonl", "step-000003.jsonl"]


@pytest.mark.parametrize(
    "text",
    [
        "sk-ant-api03-abcdefghijklmnopqrstuvwxyz", SHAPED, "ghp_abcdefghijklmnopqrstuvwxyz012345",
        "AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-abcdef", "glpat-abcdefghij0123456789",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.abcdefghijklmnop",
        "AIzaSyA-0123456789abcdefghijklmnopqrstuv",
    ],
)  # fmt: skip
def test_g14_a_key_is_known_by_its_issuers_form(text: str) -> None:
    assert redaction.hide(f"see ({text}) there") == "see (***) there"
    assert redaction.hide(f"KEY={text}\n") == "KEY=***\n"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer abcdef0123456789xyz", "Authorization: Bearer ***"),
        ('{"api_key": "0123456789abcdef"}', '{"api_key": "***"}'),
        ("export DB_PASSWORD=correct1horse2battery", "export DB_PASSWORD=***"),
        ("postgres://me:hunter22@db/x", "postgres://me:***@db/x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n", "-----BEGIN RSA PRIVATE KEY-----***"),
    ],
)
def test_g14_what_stands_behind_such_a_word_is_hidden(text: str, hidden: str) -> None:
    assert redaction.hide(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "the secret of the token is patience, said the bearer of news",
        "password: none", "risk-averse-and-very-long-compound-word-2024", "http://127.0.0.1:7453/v1",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "x_token = 5", "a@b.c:d",
    ],
)  # fmt: skip
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redaction.hide(text) == text
