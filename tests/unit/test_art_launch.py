"""`launch --art`: how it is asked for, its port, its record, and whom its door lets in (B8)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.config import resume_source
from launcher.config.setting_sources import load
from launcher.proxy import relay_rules
from launcher.proxy.relay import Relay
from launcher.records.endpoint import LocalEndpoint, keyless_option, save_token, wanted_port
from launcher.records.records import RecordStore
from launcher.types.settings import Settings
from tests.support.environment import PROGRAMS, runtime_environ
from tests.support.typed import Typed
from tests.support.upstream import Upstream, upstream_in_a_folder

pytestmark = pytest.mark.process

TOKEN = "the-token-of-this-very-run"
CANARY = "sk-real-" + "c4n4ry" * 5
ROUTES = ("/v1/chat/completions", "/slipway/policy_name")
ANOTHER_USER = 12345


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", tmp_path / "config", tmp_path / "cache")


@pytest.fixture
def settings(home: Home, tmp_path: Path) -> Callable[..., Settings]:
    def load_here(**flags: Any) -> Settings:
        return load(flags, environ={}, folder=tmp_path, home=home)

    return load_here


@pytest.fixture(scope="module")
def door() -> Iterator[tuple[str, Upstream]]:
    """The door of a run under `--art`, and what stands behind it."""
    with upstream_in_a_folder() as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN, keyless_option="--art")
        yield f"http://127.0.0.1:{relay.start()}", upstream
        relay.stop()


def test_b08_art_is_a_setting_with_arbors_port(settings: Callable[..., Settings]) -> None:
    assert (keyless_option(settings()), wanted_port(settings())) == (None, None)
    assert (keyless_option(settings(art=True)), wanted_port(settings(art=True))) == ("--art", 7453)
    assert wanted_port(settings(art=True, port="8123")) == 8123
    assert keyless_option(settings(art=True, arbor=True)) == "--arbor"


def test_b08_art_is_an_option_that_config_shows_and_a_resumed_run_keeps(
    settings: Callable[..., Settings], home: Home, tmp_path: Path
) -> None:
    shown = Typed(tmp_path / "project", tmp_path / "other")("--json", "config", "--art").stdout
    assert json.loads(shown)["settings"]["art"] == {"value": True, "source": "--art"}
    store = RecordStore(home)
    record = store.create(
        name="dev", details=resume_source.record_details(settings(art=True), "/models/mine")
    )
    assert resume_source.merge_settings(settings(), record).art
    save_token(store.folder(record.id), TOKEN)
    here = {"state": "work", "url": "http://127.0.0.1:7453", "details": {"art": True}}
    store.update(record.id, **here)
    found = LocalEndpoint.of(store.load("dev"), store)
    assert found.art and not found.arbor
    assert "PYTHONPATH" not in found.environ({}), "a program of ART's has its own client"


def test_b08_a_taken_port_names_arts_own_option(tmp_path: Path, door: tuple[str, Upstream]) -> None:
    port = int(door[0].rpartition(":")[2])
    with pytest.raises(PreflightError) as taken:
        Relay(tmp_path / "none.sock", port, token=TOKEN, keyless_option="--art").start()
    assert taken.value.hint == f"launch --art --port {port + 1}  # and {port + 1} in your program's addresses"


@pytest.mark.parametrize("path", ROUTES)
def test_b08_this_users_programs_need_no_key_and_theirs_goes_no_further(
    door: tuple[str, Upstream], path: str
) -> None:
    address, upstream = door
    upstream.headers.clear()
    keys = {"Authorization": f"Bearer {CANARY}", "X-Api-Key": CANARY}
    answer = httpx.post(f"{address}{path}", json={}, headers=keys, trust_env=False, timeout=60)
    assert answer.status_code == 200
    seen = upstream.headers[-1]
    assert seen["Authorization"] == f"Bearer {TOKEN}" and CANARY not in str(seen)


@pytest.mark.parametrize("path", ROUTES)
def test_b08_another_user_of_this_computer_is_not_let_in(door: tuple[str, Upstream], path: str) -> None:
    address, upstream = door
    upstream.seen.clear()
    body = b"{}"
    sent = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    root = [] if os.geteuid() == 0 else [shutil.which("sudo") or "sudo", "-n", "-E"]
    program = PROGRAMS / "unit" / "be_another_user.py"
    command = [*root, "env", f"PYTHONPATH={runtime_environ()['PYTHONPATH']}", sys.executable, str(program)]
    port = address.rpartition(":")[2]
    done = subprocess.run(
        [*command, str(ANOTHER_USER), "ask", port, "1"], input=sent, capture_output=True, timeout=120,
        check=True,
    )  # fmt: skip
    (answer,) = json.loads(done.stdout)
    assert " 401 " in answer and not upstream.seen


def test_b08_what_is_looked_up_by_its_words_waits_for_receipts() -> None:
    assert relay_rules.names_samples("POST", "/slipway/samples/lookup")
    assert not any(relay_rules.names_samples("POST", path) for path in ROUTES)
