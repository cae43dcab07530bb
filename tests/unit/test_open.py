"""`launch open`: a live run's page by a link that is good once, a run's that is over as plain files."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from launcher.base.home import Home
from launcher.dashboard import page_files
from launcher.dashboard.pages import Pages
from launcher.proxy.relay import Relay
from launcher.records.endpoint import save_token
from launcher.records.records import RecordStore
from tests.support.played_run import MARKUP, played_run
from tests.support.typed import Typed
from tests.support.upstream import upstream_in_a_folder

pytestmark = pytest.mark.process

TOKEN = "the-token-of-this-very-run"


@pytest.fixture
def launch(tmp_path: Path) -> Typed:
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))


@pytest.fixture
def live(store: RecordStore) -> Iterator[str]:
    """A run named `dev` whose door is in this process; its address."""
    record = played_run(store, "dev", steps=2, ended=False)
    with upstream_in_a_folder() as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN, page=Pages(store, record.id))
        url = f"http://127.0.0.1:{relay.start()}"
        save_token(store.folder(record.id), TOKEN)
        store.update(record.id, url=url)
        yield url
        relay.stop()


def value_of(script: str) -> dict[str, Any]:
    """What a piece of data hands over."""
    said = re.fullmatch(r'slipwayData\("[\w/-]+", (.*)\);\n', script, re.DOTALL)
    assert said
    return json.loads(said[1])


def test_a_live_runs_link_is_printed_and_lets_in(launch: Typed, live: str) -> None:
    done = launch("open", "dev", "--no-browser")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{live}/page/enter/") and TOKEN not in done.stdout + done.stderr
    assert "good once" in done.stderr and "5m" in done.stderr
    with httpx.Client(trust_env=False, timeout=60) as browser:
        assert browser.get(done.stdout.strip()).status_code == 200
        (cookie,) = browser.cookies.jar
        runs = browser.get(f"{live}{cookie.path}data/runs.json").json()
        assert [it["label"] for it in runs["runs"]] == ["dev"] and runs["current"] == runs["runs"][0]["id"]


def test_json_says_the_same(launch: Typed, live: str) -> None:
    said = json.loads(launch("open", "dev", "--no-browser", "--json").stdout)
    assert said["live"] is True and said["opened"] is False and said["url"].startswith(f"{live}/page/enter/")


def test_without_a_screen_nothing_is_opened(launch: Typed, live: str) -> None:
    none = {"DISPLAY": "", "WAYLAND_DISPLAY": "", "BROWSER": ""}
    assert json.loads(launch("open", "dev", "--json", **none).stdout)["opened"] is False


def test_the_browsers_command_line_has_no_link(tmp_path: Path, live: str, store: RecordStore) -> None:
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {told}\n')
    browser.chmod(0o755)
    environ = {**os.environ, "LAUNCH_HOME": str(tmp_path / "home"), "BROWSER": f"{browser} %s"}
    command = [sys.executable, "-m", "launcher.cli.main", "open", "dev", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=True)
    said = json.loads(done.stdout)
    assert said["opened"] is True
    address = told.read_text()
    assert address.startswith("file://") and "enter" not in address
    way = Path(unquote(urlsplit(address).path))
    assert stat.S_IMODE(way.stat().st_mode) == 0o600
    assert f"url={said['url']}" in way.read_text()


def test_a_run_that_is_over_becomes_a_folder_of_plain_files(launch: Typed, store: RecordStore) -> None:
    record = played_run(store, "dev", steps=3)
    done = launch("open", "dev", "--no-browser")
    index = store.folder(record.id) / "results" / "page" / "index.html"
    assert (done.returncode, done.stdout) == (0, f"{index}\n"), done.stderr
    folder = index.parent
    names = {str(it.relative_to(folder)) for it in folder.rglob("*") if it.is_file()}
    pieces = ("run", "steps", "texts", "settings", "logs", "step-1", "step-2", "step-3")
    own = {*page_files.NAMES, page_files.LICENCE, "data/runs.js"}
    assert names == own | {f"data/{record.id}/{it}.js" for it in pieces}
    data = folder / "data" / record.id
    assert value_of((data / "run.js").read_text())["run"]["state"] == "verified"
    said = value_of((data / "step-2.js").read_text())
    assert any(MARKUP in it["completion"] for it in said["lines"])
    text = index.read_text()
    assert 'data-kept="yes"' in text
    assert "Content-Security-Policy\" content=\"default-src 'none'" in text


def test_what_is_no_text_and_a_system_without_utf8_keep_no_page_away(
    tmp_path: Path, store: RecordStore
) -> None:
    record = played_run(store, "dev", steps=1)
    store.update(record.id, command=("python", "caf\udce9.py", "été"))
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environ = {**os.environ, "LAUNCH_HOME": str(tmp_path / "home"), **ascii_alone}
    command = [sys.executable, "-m", "launcher.cli.main", "open", "dev", "--no-browser"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = store.folder(record.id) / "results" / "page"
    said = value_of((folder / "data" / record.id / "run.js").read_text(encoding="utf-8"))
    assert said["run"]["command"] == "python caf?.py été"
    assert "loading …" in (folder / "index.html").read_text(encoding="utf-8")


def test_made_again_it_has_what_is_new_and_nothing_old(launch: Typed, store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2)
    launch("open", "dev", "--no-browser")
    results = store.folder(record.id) / "results"
    data = results / "page" / "data" / record.id
    (data / "step-9.js").write_text("old")
    (results / "rollouts" / "step-000001.jsonl").unlink()
    launch("open", "dev", "--no-browser")
    assert {it.name for it in data.iterdir() if it.name.startswith("step-")} == {"step-2.js"}
    assert not [it for it in results.iterdir() if it.name.startswith(".page")]


def test_without_a_name_all_runs_are_there_with_their_figures_and_without_their_texts(
    launch: Typed, store: RecordStore
) -> None:
    none = launch("open", "--no-browser")
    assert none.returncode == 3 and "there is no run yet" in none.stderr
    one, other = played_run(store, "one", steps=2), played_run(store, "other", steps=3, ended=False)
    done = launch("open", "--no-browser")
    data = Path(done.stdout.strip()).parent / "data"
    assert done.returncode == 0, done.stderr
    listed = value_of((data / "runs.js").read_text())
    assert {it["label"] for it in listed["runs"]} == {"one", "other"} and listed["texts"] is False
    for record, steps in ((one, [1, 2]), (other, [1, 2, 3])):
        assert {it.name for it in (data / record.id).iterdir()} == {
            "run.js",
            "steps.js",
            "texts.js",
            "settings.js",
        }
        assert value_of((data / record.id / "steps.js").read_text())["steps"] == steps


def test_a_live_run_that_nobody_attends_is_shown_from_its_files(launch: Typed, store: RecordStore) -> None:
    record = played_run(store, "dev", steps=1, ended=False)
    store.update(record.id, launch=None)
    done = launch("open", "dev", "--no-browser")
    assert done.returncode == 0 and done.stdout.endswith("index.html\n")


def test_a_run_whose_door_is_closed_already_is_shown_from_its_files(
    launch: Typed, store: RecordStore
) -> None:
    """As while its machine is taken down."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        record = played_run(store, "dev", steps=1, ended=False)
        empty = store.create(name="empty")
        for one in (record, empty):
            save_token(store.folder(one.id), TOKEN)
            store.update(one.id, url=url)
        done = launch("open", "dev", "--no-browser")
        nothing = launch("open", "empty", "--no-browser")
    assert done.returncode == 0 and done.stdout.endswith("index.html\n")
    assert (
        "the endpoint of dev did not give a link" in done.stderr
        and "showing the files on this computer" in done.stderr
    )
    assert nothing.returncode == 3 and "the endpoint of empty did not give a link" in nothing.stderr
    assert "launch status empty" in nothing.stderr


def test_nothing_to_show_and_no_endpoint_yet_are_told_in_three_lines(
    launch: Typed, store: RecordStore
) -> None:
    over = store.create(name="over")
    store.update(over.id, state="verified", ended=over.created)
    done = launch("open", "over", "--no-browser")
    assert done.returncode == 3 and "there is nothing to show for over" in done.stderr
    assert "launch logs over" in done.stderr
    store.create(name="early")
    done = launch("open", "early", "--no-browser")
    assert done.returncode == 2 and "early has no endpoint now" in done.stderr
