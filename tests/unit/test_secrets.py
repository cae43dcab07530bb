"""Secrets: who gets them, and that nothing that is written has them. Live: tests/e2e/test_secrets.py."""

# ruff: noqa: E501 - tables
from __future__ import annotations

import base64
import logging
from pathlib import Path
from urllib.parse import quote

import pytest

from launcher.base import credentials
from launcher.base.credentials import SECRETS
from launcher.base.home import Home
from launcher.base.log import Redactor
from launcher.config import preflight
from launcher.records.endpoint import save_token
from launcher.records.records import RecordStore
from runtime.__main__ import children
from runtime.shared.runtime_config import RuntimeConfig
from tests.support.canaries import in_files, spellings
from tests.support.typed import Typed

CANARY = "canary+of/a=secret-0123456789"


@pytest.mark.parametrize(
    "text",
    [
        "x {} y",
        *(f"Basic {base64.b64encode(f'{before}{CANARY}:after'.encode()).decode()}" for before in ("", "u", "us", "usr")),
        base64.urlsafe_b64encode(f"a{CANARY}".encode()).decode(),
        f"https://host/?key={quote(CANARY, safe='')}",
        f"https://host/?key={quote(CANARY)}",
    ],
)  # fmt: skip
def test_a_hidden_secret_is_cleaned_from_any_spelling(text: str) -> None:
    redactor = Redactor()
    redactor.hide([CANARY])
    text = text.format(CANARY)
    assert any(spelling in text.encode() for spelling in spellings(CANARY)), "the test would see it"
    cleaned = redactor.redact(text).encode()
    assert not any(spelling in cleaned for spelling in spellings(CANARY))
    assert b"***" in cleaned


def test_a_traceback_in_the_log_is_cleaned() -> None:
    redactor = Redactor()
    redactor.hide([CANARY])
    try:
        raise RuntimeError(f"refused {CANARY}")
    except RuntimeError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("launcher", logging.ERROR, __file__, 1, "x %s", (CANARY,), info)
    text = redactor.format(record)
    assert "Traceback" in text and CANARY not in text


def test_the_runtime_gets_what_it_needs_of_the_environment_and_nothing_else() -> None:
    environ = {
        "PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0",
        "HTTPS_PROXY": "http://proxy", "HF_HOME": "/models", "VLLM_LOGGING_LEVEL": "DEBUG", "SLIPWAY_FAILPOINT": "x",
    }  # fmt: skip
    others = {
        "OPENAI_API_KEY": CANARY, "AWS_SECRET_ACCESS_KEY": CANARY, "GITHUB_TOKEN": CANARY, "DATABASE_URL": CANARY,
        "LAUNCH_API_KEY": CANARY, "PYTHONPATH": "/mine", "VIRTUAL_ENV": "/mine", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    assert credentials.runtime_environ(environ | others, {"HF_TOKEN": "t"}) == environ | {"HF_TOKEN": "t"}


def test_each_child_of_the_runtime_gets_its_own_secrets_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    config = RuntimeConfig(run_id="r", model_path="m", state_dir=str(tmp_path), socket_dir=str(tmp_path))
    given = {
        spec.name: {name for name in ("HF_TOKEN", "WANDB_API_KEY") if name in spec.environ()}
        for spec in children(tmp_path / "runtime.json", config, b"token")
    }
    assert given == {"trainer": {"HF_TOKEN", "WANDB_API_KEY"}, "engine-0": {"HF_TOKEN"}, "gateway": set()}


RENTED = ["--gpus", "H100:4", "--infra", "aws"]
VERBS = [
    ["status"], ["status", "dev"], ["logs", "dev"], ["pull", "dev"], ["down", "dev"], ["env", "dev"],
    ["gc"], ["doctor"], ["config"], ["--", "true"],
    ["ssh", "rented", "--", "true"], ["exec", "rented", "--", "true"], ["push", "rented"], ["logs", "rented", "--which", "trainer"],
    ["plan", *RENTED], ["--dry-run", *RENTED], [*RENTED, "-y", "--", "true"],
]  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_g14_a_command_that_crashes_shows_no_secret(
    words: list[str], as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command, ended by an exception that quotes every secret there is, with --debug."""
    typed = Typed(tmp_path / "project", tmp_path / "home")
    in_file, in_shell, token = f"{CANARY}-file", f"{CANARY}-shell", f"{CANARY}-token"
    env_file = typed.folder / ".env"
    env_file.write_text(f"OTHER_API_KEY='{in_file}'\n")
    env_file.chmod(0o600)
    store = RecordStore(Home.find({"LAUNCH_HOME": str(typed.home)}))
    record = store.create(name="dev")
    store.update(record.id, state="work", url="http://127.0.0.1:1")
    save_token(store.folder(record.id), token)
    if "rented" in words:
        store.update(store.create(name="rented").id, state="work", machine={"kind": "cloud"})
    (store.folder(record.id) / "launch.log").write_text("x")
    known = [in_shell]
    known += [in_file] if words[0] in ("config", "doctor", "--", "plan", *RENTED) else []
    known += [token] if words in (["env", "dev"], ["status", "dev"]) else []

    def crash(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"a library quotes {known} and {base64.b64encode(known[0].encode())!r}")

    for name in ("result", "stream_log"):
        monkeypatch.setattr(f"launcher.console.output.Output.{name}", crash)
    # N12: nothing here gets as far as using one.
    monkeypatch.setattr("launcher.config.remote_tools.missing_tools", lambda *tools: [])
    monkeypatch.setattr(preflight, "check_runtime_environment", crash)
    monkeypatch.setattr("launcher.backends.cloud_machine.CloudMachine.from_description", crash)
    monkeypatch.setattr("launcher.backends.skypilot.prices.market", crash)
    monkeypatch.setattr("launcher.backends.skypilot.price_snapshot.market", crash)
    monkeypatch.setattr("launcher.teardown.take_down.pull", crash)
    monkeypatch.setattr("launcher.base.processes.wait_for_end", crash)
    monkeypatch.setattr("launcher.base.processes.ProcessId.send", lambda self, number: None)
    options = ["--debug", *(["--json"] if as_json else [])]
    done = typed(*options, *words, SHELL_TOKEN=in_shell)
    assert done.returncode == 1, done.stderr
    assert "Traceback" in done.stderr and "a library quotes" in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert not any(spelling in (done.stdout + done.stderr).encode() for spelling in spellings(CANARY))


@pytest.mark.parametrize("spelling", sorted(spellings(CANARY)))
def test_what_looks_for_canaries_finds_them(spelling: bytes, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"\0before" + spelling + b"after")
    (tmp_path / "deep" / "other").write_bytes(b"nothing")
    assert set(in_files([tmp_path], [CANARY, "unseen-secret"])) == {(tmp_path / "deep" / "file", CANARY)}
