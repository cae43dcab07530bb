"""The page in Debian's chromium (`apt-get install chromium`): while a real run goes on, and of a long one.

Pictures at two widths in both themes are in `$SLIPWAY_LONG_DIR`, for people to look at; what was seen is in
tests/bench/RESULTS.md. Requests are those of the browser's own protocol and of its net log.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from launcher.base.home import Home
from launcher.dashboard import page_folder
from launcher.dashboard.run_page_data import RunPageData
from launcher.proxy.relay import Relay
from launcher.records.records import RecordStore, RunRecord
from tests.e2e.conftest import make_home
from tests.support.browser import Browser, opened, outside
from tests.support.launched import Launched
from tests.support.played_run import MARKUP, add_step, played_run
from tests.support.ports import free_port
from tests.support.upstream import upstream_in_a_folder

pytestmark = pytest.mark.long

TOKEN = "the-token-of-this-very-run"
WIDTHS = (1280, 420)
# 157 × 64: more than 10,000 rollouts.
STEPS, ROLLOUTS = 157, 64
MOST_BYTES = 300 * 2**20
PAINT_SECONDS = 2.0
STANDS = "document.querySelectorAll('.tile').length === 6 && document.querySelectorAll('.group').length > 0"
SHOWN_STEP = "Number(document.querySelector('input.step').value)"
QUICKSTART_STEPS = 12
ASKS_OUTSIDE = "fetch('https://outside.example/').then(() => 'went', () => 'refused')"
INLINE = "Object.assign(document.createElement('script'), {text: 'window.owned = 1'})"


@dataclass(frozen=True)
class LongRun:
    """A played run, live behind a door of this process."""

    url: str
    store: RecordStore
    record: RunRecord

    @property
    def results(self) -> Path:
        return self.store.folder(self.record.id) / "results"

    def link(self) -> str:
        shown = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(f"{self.url}/page/link", headers=shown, trust_env=False, timeout=60)
        return self.url + answer.raise_for_status().json()["path"]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongRun]:
    store = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path_factory.mktemp("home"))}))
    record = played_run(store, "mail", STEPS, ROLLOUTS, ended=False)
    with upstream_in_a_folder() as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN, page=RunPageData(store, record.id))
        yield LongRun(f"http://127.0.0.1:{relay.start()}", store, record)
        relay.stop()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("SLIPWAY_LONG_DIR", tmp_path)) / "page"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def photograph(browser: Browser, to: Path, name: str) -> None:
    """At each width and in each theme; nothing may be wider than the window."""
    for width in WIDTHS:
        for dark in (False, True):
            browser.look(width, dark=dark)
            browser.until(f"innerWidth === {width} && document.querySelector('.uplot canvas') !== null")
            browser.run("new Promise((done) => setTimeout(done, 300))")  # redrawn, as the observer is told
            browser.picture(to / f"{name}-{width}-{'dark' if dark else 'light'}.png", most_pixels=2600)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), width
    browser.look(WIDTHS[0])


def markup_is_text(browser: Browser) -> None:
    """What a completion holds is there to be read, and has become nothing else."""
    assert MARKUP in browser.run("document.getElementById('said').textContent")
    assert browser.run("document.querySelectorAll('#said script, #said img').length") == 0
    assert "owned" not in browser.run("document.title")


def test_the_page_while_a_run_goes_on_and_after_it(tmp_path: Path, pictures: Path) -> None:
    home, port = make_home(tmp_path / "home"), free_port()
    words = ["examples/quickstart.py", "--steps", str(QUICKSTART_STEPS)]
    run = Launched(home, ["--name", "watched", "--port", str(port), "--", sys.executable, *words])
    try:
        run.wait_for_text("ready: http", 900)
        asking = Launched(home, ["open", "watched", "--no-browser", "--json"])
        assert asking.wait(60) == 0
        (given,) = asking.events
        with opened(tmp_path / "live") as browser:
            browser.look(WIDTHS[0])
            browser.go(given["url"])
            browser.until(STANDS, 300)
            assert "/page/enter/" not in browser.run("location.href")
            seen = browser.until(SHOWN_STEP)
            photograph(browser, pictures, "live")
            assert browser.until(f"{SHOWN_STEP} > {seen} && {SHOWN_STEP}", 300) > seen
            assert "tok/s" in browser.run("document.getElementById('tiles').textContent")
            assert "published" in browser.until("document.querySelector('#proofs table')?.textContent")
            assert run.wait(900) == 0
            said = browser.until("document.querySelector('#notice:not([hidden])')?.textContent", 60)
            assert "launch open" in said
            live_asked = list(browser.asked)
        assert {it.split("/page/")[0] for it in live_asked if not it.startswith("data:")} == {
            f"http://127.0.0.1:{port}"
        }
        assert outside(tmp_path / "live") == []
        kept = Launched(home, ["open", "watched", "--no-browser", "--json"])
        assert kept.wait(60) == 0
        with opened(tmp_path / "kept") as browser:
            browser.go(Path(kept.events[0]["file"]).as_uri())
            browser.until(STANDS)
            assert browser.run(SHOWN_STEP) == QUICKSTART_STEPS
            photograph(browser, pictures, "kept")
            assert browser.complaints == []
            assert all(it.startswith(("file://", "data:")) for it in browser.asked)
        assert outside(tmp_path / "kept") == []
    finally:
        if run.process.poll() is None:
            run.kill_tree()


def test_ten_thousand_rollouts_are_painted_at_once_and_held_in_little(
    long_run: LongRun, tmp_path: Path, pictures: Path
) -> None:
    with opened(tmp_path / "browser") as browser:
        browser.look(WIDTHS[0])
        browser.go(long_run.link())
        painted = browser.until(
            "location.href.includes('/enter/') ? 0"
            " : performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        )
        stood = browser.until(f"{STANDS} && performance.now()")
        asked = [it for it in browser.asked if "/data/" in it]
        assert sum("/step-" in it for it in asked) == 1, "texts of other steps were loaded"
        first = browser.page_bytes()
        markup_is_text(browser)
        photograph(browser, pictures, "long")
        for step in range(1, STEPS, 5):
            browser.run(f"slipway.completions.choose({step})")
            browser.until(f"document.querySelector('#said .summary').textContent.includes('step {step} ')")
        browser.run("document.querySelector('#proofs button').click()")  # all of them
        last = browser.page_bytes()
        add_step(long_run.results, STEPS + 1, 2e9, ROLLOUTS, random.Random(3))
        browser.run("document.getElementById('follow').click()")
        browser.until(f"{SHOWN_STEP} === {STEPS + 1}")
        assert browser.run("document.querySelector('.u-legend .u-value').textContent") == str(STEPS + 1)
        assert browser.complaints == []
    seen = {"rollouts": STEPS * ROLLOUTS, "paint_seconds": painted / 1000, "stands_seconds": stood / 1000}
    seen |= {"megabytes": first / 2**20, "after_reading_megabytes": last / 2**20}
    (pictures / "long.json").write_text(json.dumps(seen))
    assert painted / 1000 <= PAINT_SECONDS, seen
    assert max(first, last) <= MOST_BYTES, seen
    assert outside(tmp_path / "browser") == []


def test_the_kept_folder_of_a_long_run_is_the_same_page(long_run: LongRun, tmp_path: Path) -> None:
    index = page_folder.write(RunPageData(long_run.store, long_run.record.id), long_run.results)
    with opened(tmp_path / "browser") as browser:
        browser.go(index.as_uri())
        browser.until(STANDS)
        painted = browser.first_paint_seconds()
        markup_is_text(browser)
        browser.run("slipway.completions.choose(3)")
        browser.until(f"{SHOWN_STEP} === 3 && document.querySelector('#said .summary').textContent")
        browser.until("document.querySelectorAll('.piece.call').length > 0")
        assert browser.page_bytes() <= MOST_BYTES and painted <= PAINT_SECONDS
        assert browser.complaints == []
        assert all(it.startswith(("file://", "data:")) for it in browser.asked)
    assert outside(tmp_path / "browser") == []


def test_a_file_of_this_users_leads_to_the_page(long_run: LongRun, tmp_path: Path) -> None:
    """As `launch open` does it: a cookie that no other site can have sent comes along all the same."""
    way = tmp_path / "open.html"
    way.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={long_run.link()}">')
    with opened(tmp_path / "browser") as browser:
        browser.go(way.as_uri())
        browser.until(STANDS)
        assert browser.run("location.pathname").startswith("/page/")
        assert browser.complaints == []


def test_a_browser_without_the_link_sees_nothing(long_run: LongRun, tmp_path: Path) -> None:
    link = long_run.link()
    with opened(tmp_path / "one") as browser:
        browser.go(link)
        place = browser.until(f"{STANDS} && location.href")
        assert browser.run("document.cookie") == ""
    with opened(tmp_path / "another") as browser:
        for address in (place, link, f"{long_run.url}/page/"):
            browser.go(address)
            assert "launch open" in browser.until("document.querySelector('pre')?.textContent")
            assert "mail" not in browser.run("document.body.textContent")


def test_the_policy_holds_in_a_browser_and_the_log_would_have_told(long_run: LongRun, tmp_path: Path) -> None:
    """What a completion would do if it were run: asked of the page itself, none of it happens."""
    with opened(tmp_path / "browser") as browser:
        browser.go(long_run.link())
        browser.until(STANDS)
        assert browser.run(ASKS_OUTSIDE) == "refused"
        browser.run(
            "document.body.append(Object.assign(new Image(), {src: 'https://outside.example/x.png'}))"
        )
        browser.run(f"document.body.append({INLINE})")
        assert browser.run("window.owned === undefined")
        assert len(browser.complaints) >= 2
    assert outside(tmp_path / "browser") == []
    with opened(tmp_path / "free") as browser:
        browser.go("data:text/html,<p>free</p>")
        browser.until("document.querySelector('p') !== null")
        assert browser.run(ASKS_OUTSIDE) == "refused"  # there is no such host
    assert outside(tmp_path / "free") == ["https://outside.example/"]
