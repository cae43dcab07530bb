"""The page in Debian's chromium (`apt-get install chromium`): while a real run goes on, and of a long one.

Pictures at two widths in both themes are in `$SLIPWAY_LONG_DIR`, for people to look at; what was seen is in
tests/bench/RESULTS.md. Requests are those of the browser's own protocol and of its net log.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from launcher.base.home import Home
from launcher.dashboard import page_folder
from launcher.dashboard.pages import Pages
from launcher.proxy.relay import Relay
from launcher.records.records import RecordStore, RunRecord
from tests.e2e.conftest import make_home
from tests.support.browser import Browser, opened, outside
from tests.support.launched import Launched
from tests.support.played_run import MARKUP, played_agent, played_run
from tests.support.ports import free_port
from tests.support.upstream import upstream_in_a_folder

pytestmark = pytest.mark.long

TOKEN = "the-token-of-this-very-run"
WIDTHS = (1280, 420)
# 157 × 64: more than 10,000 rollouts.
STEPS, ROLLOUTS, TURNS = 157, 64, 20
MOST_BYTES, MOST_SERVER_BYTES = 300 * 2**20, 50 * 2**20
PAINT_SECONDS, SEARCH_SECONDS = 2.0, 1.0
STANDS = "document.querySelectorAll('.tile').length === 6 && document.querySelectorAll('.uplot').length > 1"
READS = "document.querySelectorAll('.rollout').length > 0"
SHOWN_STEP = "Number(document.querySelector('input.step').value)"
ABOUT = "document.getElementById('about').textContent"
QUICKSTART_STEPS = 12
ASKS_OUTSIDE = "fetch('https://outside.example/').then(() => 'went', () => 'refused')"
CHANGE = """(where, value, name) => {
    const it = document.querySelector(where);
    it.value = value;
    it.dispatchEvent(new Event(name));
}"""
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


@contextlib.contextmanager
def served(store: RecordStore, record: RunRecord) -> Iterator[LongRun]:
    with upstream_in_a_folder() as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN, page=Pages(store, record.id))
        yield LongRun(f"http://127.0.0.1:{relay.start()}", store, record)
        relay.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path_factory.mktemp("home"))}))


@pytest.fixture(scope="module")
def mail(store: RecordStore) -> Iterator[LongRun]:
    """Two predictors, tool calls, markup in the completions."""
    with served(store, played_run(store, "mail", 24, ROLLOUTS, ended=False)) as run:
        yield run


@pytest.fixture(scope="module")
def long_run(store: RecordStore) -> Iterator[LongRun]:
    with served(store, played_agent(store, "shop", STEPS, ROLLOUTS, TURNS, ended=False)) as run:
        yield run


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


def go(browser: Browser, run_id: str, *place: str) -> None:
    browser.run(f"location.hash = '#/{'/'.join((run_id, *place))}'")


def open_rollout(browser: Browser, at: int = 0) -> None:
    browser.until(READS)
    browser.run(f"document.querySelectorAll('.rollout > summary')[{at}].click()")
    browser.until(f"document.querySelectorAll('.rollout')[{at}].querySelector('.conversation') !== null")


def markup_is_text(browser: Browser) -> None:
    """What a completion holds is there to be read, and has become nothing else."""
    assert MARKUP in browser.run("document.getElementById('rollouts').textContent")
    assert browser.run("document.querySelectorAll('#rollouts script, #rollouts img').length") == 0
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
            photograph(browser, pictures, "live")
            run_id = browser.run("location.hash.split('/')[1]")
            go(browser, run_id, "rollouts")
            seen = browser.until(SHOWN_STEP)
            assert browser.until(f"{SHOWN_STEP} > {seen} && {SHOWN_STEP}", 300) > seen
            go(browser, run_id, "logs", "program")
            browser.until("document.getElementById('log').textContent.includes('step')")
            go(browser, run_id, "settings")
            browser.until("document.querySelectorAll('#settings tr').length > 20")
            go(browser, run_id, "proofs")
            assert "published" in browser.until("document.querySelector('#proofs table')?.textContent")
            go(browser, run_id, "overview")
            assert run.wait(900) == 0
            ended = browser.until(f"{ABOUT}.includes('down: verified') && {ABOUT}", 60)
            assert "ended after" in ended
            assert browser.run("document.querySelector('#notice').hidden")
            go(browser, run_id, "settings")  # as the last step had them, though they were looked at before
            browser.until(
                f"document.getElementById('settings').textContent.includes('step {QUICKSTART_STEPS}')"
            )
            assert "launch open watched" in browser.run("document.getElementById('footer').textContent")
            assert browser.complaints == []
            live_asked = list(browser.asked)
        assert {it.split("/page/")[0] for it in live_asked if not it.startswith("data:")} == {
            f"http://127.0.0.1:{port}"
        }
        assert outside(tmp_path / "live") == []
        kept = Launched(home, ["open", "watched", "--no-browser", "--json"])
        assert kept.wait(60) == 0
        elsewhere = tmp_path / "another" / "computer"
        shutil.copytree(Path(kept.events[0]["file"]).parent, elsewhere)
        with opened(tmp_path / "kept") as browser:
            browser.go((elsewhere / "index.html").as_uri())
            browser.until(STANDS)
            photograph(browser, pictures, "kept")
            go(browser, run_id, "rollouts")
            open_rollout(browser)
            assert browser.run(SHOWN_STEP) == QUICKSTART_STEPS
            photograph(browser, pictures, "kept-rollouts")
            assert browser.complaints == []
            assert all(it.startswith(("file://", "data:")) for it in browser.asked)
        assert outside(tmp_path / "kept") == []
    finally:
        if run.process.poll() is None:
            run.kill_tree()


def test_ten_thousand_rollouts_of_twenty_turns_are_painted_at_once_and_held_in_little(
    long_run: LongRun, tmp_path: Path, pictures: Path
) -> None:
    server = psutil.Process()
    with opened(tmp_path / "browser") as browser:
        browser.look(WIDTHS[0])
        link = long_run.link()
        before = server.memory_info().rss
        browser.go(link)
        painted = browser.until(
            "location.href.includes('/enter/') ? 0"
            " : performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        )
        stood = browser.until(f"{STANDS} && performance.now()")
        browser.until("document.querySelectorAll('.tile').length === 6")
        go(browser, long_run.record.id, "rollouts")
        browser.until(READS)
        asked = [it for it in browser.asked if "/data/" in it]
        assert sum("/step-" in it for it in asked) == 1, "texts of other steps were loaded"
        first = browser.page_bytes()
        open_rollout(browser)
        # A conversation of twenty turns has each text once, and its reward once.
        assert browser.run("document.querySelectorAll('.rollout[open] .reward').length") == 1
        assert browser.run("document.querySelectorAll('.rollout[open] .turn.policy').length") == TURNS
        asked_once = "document.querySelector('.rollout[open]').textContent.split('cost?').length - 1"
        assert browser.run(asked_once) <= 2  # in the closed summary of the prompt, and in it
        for step in range(1, STEPS, 5):
            browser.run(f"slipway.rollouts.choose({step})")
            browser.until(
                f"document.querySelector('#rollouts .summary')?.textContent.includes('step {step} ')"
            )
        find = f"slipway.load('{long_run.record.id}/search', {{ text: 'THEY COST 44' }})"
        browser.run(f"{find}.then(() => true)")  # the files are in memory now, as after a look at the page
        began = browser.run("performance.now()")
        hits = browser.run(f"{find}.then((found) => found.length)")
        searched = browser.run("performance.now()") - began
        last = browser.page_bytes()
        grown = server.memory_info().rss - before
        assert browser.complaints == []
    seen = {"rollouts": STEPS * ROLLOUTS, "turns": TURNS, "hits": hits, "search_seconds": searched / 1000}
    seen |= {"paint_seconds": painted / 1000, "stands_seconds": stood / 1000}
    seen |= {"megabytes": first / 2**20, "after_reading_megabytes": last / 2**20}
    seen |= {"server_grew_megabytes": grown / 2**20}
    (pictures / "long.json").write_text(json.dumps(seen))
    assert painted / 1000 <= PAINT_SECONDS, seen
    assert max(first, last) <= MOST_BYTES, seen
    assert searched / 1000 <= SEARCH_SECONDS and hits, seen
    assert grown <= MOST_SERVER_BYTES, seen
    assert outside(tmp_path / "browser") == []


def test_each_view_at_both_widths_and_in_both_themes(mail: LongRun, tmp_path: Path, pictures: Path) -> None:
    run_id = mail.record.id
    with opened(tmp_path / "browser") as browser:
        browser.look(WIDTHS[0])
        browser.go(mail.link())
        browser.until(STANDS)
        photograph(browser, pictures, "overview")
        go(browser, run_id, "rollouts")
        open_rollout(browser)
        markup_is_text(browser)
        photograph(browser, pictures, "rollouts")
        browser.run("document.querySelector('.group-head a').click()")
        browser.until("document.querySelectorAll('.hits tbody tr').length === 24")
        photograph(browser, pictures, "one-example")
        browser.run(
            "(() => { const it = document.getElementById('search'); it.value = 'thursday';"
            " it.dispatchEvent(new Event('input')); })()"
        )
        browser.until("document.querySelector('.hits mark')?.textContent === 'Thursday'")
        browser.run("document.querySelector('.hits a').click()")
        browser.until("document.querySelector('.rollout[open] .conversation') !== null")
        # The link to a rollout opens it in a page that was not open before; from a search it leads back.
        linked = "document.querySelector('.rollout[open] .conversation > .facts:last-child a').href"
        place = browser.run(linked)
        browser.go("about:blank")
        browser.go(place)
        browser.until("document.querySelector('.rollout[open] .conversation') !== null")
        go(browser, run_id, "rollouts", "search", "thursday")
        browser.until("document.querySelector('.hits mark') !== null")
        go(browser, run_id, "rollouts")
        browser.until(f"{READS} && document.querySelector('.hits') === null")
        go(browser, run_id, "overview")
        browser.until(STANDS)
        for view in ("settings", "proofs", "logs"):
            go(browser, run_id, view)
            browser.run("new Promise((done) => setTimeout(done, 300))")
            photograph(browser, pictures, view)
        assert browser.complaints == []


def test_the_folder_of_several_runs_is_the_same_page(
    mail: LongRun, long_run: LongRun, tmp_path: Path, pictures: Path
) -> None:
    ids = [mail.record.id, long_run.record.id]
    index = page_folder.write(Pages(mail.store, None, ids), tmp_path / "both")
    with opened(tmp_path / "browser") as browser:
        browser.look(WIDTHS[0])
        browser.go(index.as_uri())
        browser.until("document.querySelectorAll('#runs tbody tr').length === 2")
        painted = browser.first_paint_seconds()
        photograph_runs(browser, pictures)
        go(browser, ids[0], "rollouts")
        open_rollout(browser)
        markup_is_text(browser)
        browser.run("slipway.rollouts.choose(3)")
        browser.until(f"{SHOWN_STEP} === 3 && document.querySelector('#rollouts .summary').textContent")
        browser.until("document.querySelectorAll('.rollout').length > 0")
        filters_end_with_the_run(browser, ids)
        follow_an_example(browser)
        assert browser.page_bytes() <= MOST_BYTES and painted <= PAINT_SECONDS
        assert browser.complaints == []
        assert all(it.startswith(("file://", "data:")) for it in browser.asked)
    assert outside(tmp_path / "browser") == []


def photograph_runs(browser: Browser, pictures: Path) -> None:
    """The index, then both runs beside each other."""
    browser.picture(pictures / "runs.png")
    for at in (0, 1):
        browser.run(f"document.querySelectorAll('#runs input[type=checkbox]')[{at}].click()")
    browser.run("[...document.querySelectorAll('#runs-controls button')].at(-1).click()")
    browser.until("document.querySelectorAll('#compare-charts .uplot').length >= 1")
    assert browser.run("document.querySelectorAll('#differences tr.differs').length") > 0
    photograph(browser, pictures, "compared")
    choose_figures(browser)


def choose_figures(browser: Browser) -> None:
    """A figure is added, another taken away; the address says so, and brings them back."""
    shown = "document.querySelector('[data-chart=\"compare {}\"] .uplot') {} null"
    browser.run(f"({CHANGE})('#compare-controls select', 'grad_norm', 'change')")
    browser.until(shown.format("grad_norm", "!=="))
    browser.run("document.querySelector('[data-chart=\"compare reward\"] button.remove').click()")
    browser.until(shown.format("reward", "==="))
    place = browser.run("location.href")
    browser.go("about:blank")
    browser.go(place)
    browser.until(f"{shown.format('grad_norm', '!==')} && {shown.format('reward', '===')}")


def follow_an_example(browser: Browser) -> None:
    """The same prompt in the other steps; the file that is open here is the first to be read again."""
    browser.until(f"{SHOWN_STEP} === {STEPS} && document.querySelector('.group-head a') !== null")
    browser.run("document.querySelector('.group-head a').click()")
    browser.until("document.querySelectorAll('.hits tbody tr').length > 0")


def filters_end_with_the_run(browser: Browser, ids: list[str]) -> None:
    go(browser, ids[0], "rollouts")
    browser.until(READS)
    browser.run(f"({CHANGE})('#rollouts-controls input.bound', '5000', 'input')")
    browser.until("document.querySelector('#rollouts > button') !== null")
    go(browser, ids[1], "rollouts")
    browser.until(f"{READS} && document.querySelector('#rollouts-controls input.bound').value === ''")


def test_a_megabyte_of_text_escapes_and_marks_that_turn_it_around_are_text(
    store: RecordStore, tmp_path: Path
) -> None:
    record = played_run(store, "odd", 1, 8, ended=False)
    path = store.folder(record.id) / "results" / "rollouts" / "step-000001.jsonl"
    texts = ["\u202eback to front\u2066", "\x1b[31mred\x07", f"{MARKUP}</script>", "x " * 2**19, "\ud83d"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, text in zip(lines, texts, strict=False):
        line |= {"completion": text, "group": text[:40], "predictor": text[:20]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(store, record) as run, opened(tmp_path / "browser") as browser:
        browser.go(run.link())
        browser.until("document.querySelectorAll('.tile').length === 6")
        go(browser, record.id, "rollouts")
        browser.until(READS)
        for at in range(browser.run("document.querySelectorAll('.rollout').length")):
            open_rollout(browser, at)
        markup_is_text(browser)
        assert "back to front" in browser.run("document.getElementById('rollouts').textContent")
        assert browser.run("getComputedStyle(document.querySelector('.words')).unicodeBidi") == "plaintext"
        assert browser.complaints == []


def test_a_file_of_this_users_leads_to_the_page(mail: LongRun, tmp_path: Path) -> None:
    """As `launch open` does it: a cookie that no other site can have sent comes along all the same."""
    way = tmp_path / "open.html"
    way.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={mail.link()}">')
    with opened(tmp_path / "browser") as browser:
        browser.go(way.as_uri())
        browser.until(STANDS)
        assert browser.run("location.pathname").startswith("/page/")
        assert browser.complaints == []


def test_a_browser_without_the_link_sees_nothing(mail: LongRun, tmp_path: Path) -> None:
    link = mail.link()
    with opened(tmp_path / "one") as browser:
        browser.go(link)
        place = browser.until(f"{STANDS} && location.href")
        assert browser.run("document.cookie") == ""
    with opened(tmp_path / "another") as browser:
        for address in (place, link, f"{mail.url}/page/"):
            browser.go(address)
            assert "launch open" in browser.until("document.querySelector('pre')?.textContent")
            assert "mail" not in browser.run("document.body.textContent")


def test_the_policy_holds_in_a_browser_and_the_log_would_have_told(mail: LongRun, tmp_path: Path) -> None:
    """What a completion would do if it were run: asked of the page itself, none of it happens."""
    with opened(tmp_path / "browser") as browser:
        browser.go(mail.link())
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
