"""The page behind the door: who gets in, by what, and what another page or another user gets."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from aiohttp import web

from launcher.base.home import Home
from launcher.dashboard import page_files
from launcher.dashboard.pages import Pages
from launcher.proxy.page_auth import COOKIE, LINK_SECONDS, PageAuth
from launcher.proxy.relay import Relay
from launcher.records.records import RecordStore
from tests.support.played_run import MARKUP, played_run
from tests.support.upstream import upstream_in_a_folder

pytestmark = pytest.mark.process

TOKEN = "the-token-of-this-very-run"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
SHOWN_LINE = f"Authorization: Bearer {TOKEN}\r\n"
NAVIGATES = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
OWN = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}


@dataclass(frozen=True)
class Door:
    """A relay with a page. `place`: where the page is; `cookie`: what a browser of this user has; `data`: the
    run's own data."""

    relay: Relay
    port: int
    place: str
    cookie: str
    data: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={**headers}, trust_env=False, timeout=60)

    def seen(self, name: str, **headers: str) -> httpx.Response:
        """As the page itself asks."""
        return self.get(self.place + name, Cookie=f"{COOKIE}={self.cookie}", **{**OWN, **headers})


def link(url: str) -> dict[str, str]:
    return (
        httpx.post(f"{url}/page/link", headers=SHOWN, trust_env=False, timeout=60).raise_for_status().json()
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path_factory.mktemp("home"))}))


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """A loaded computer's runtime is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.proxy.relay._STATUS_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def door(store: RecordStore, patient: None) -> Iterator[Door]:
    async def status(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == SHOWN["Authorization"]
        return web.json_response({"phase": "ready", "version": 3, "step": 3, "lease_left_seconds": 800.0})

    record = played_run(store, "dev", steps=3, ended=False)
    with upstream_in_a_folder({"/slipway/status": status}) as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN, keyless_option="--arbor", page=Pages(store, record.id))
        port = relay.start()
        url = f"http://127.0.0.1:{port}"
        given = link(url)
        entered = httpx.get(url + given["path"], headers=NAVIGATES, trust_env=False, timeout=60)
        cookie = re.fullmatch(rf"{COOKIE}=([\w-]+);.*", entered.headers["Set-Cookie"])
        assert cookie
        yield Door(relay, port, given["page"], cookie[1], f"data/{record.id}")
        relay.stop()


def test_the_link_lets_one_browser_in_once(door: Door) -> None:
    given = link(door.url)
    assert door.get(given["path"], **NAVIGATES).status_code == 200
    again = door.get(given["path"], **NAVIGATES)
    assert again.status_code == 401 and "Set-Cookie" not in again.headers
    assert "launch open" in again.text


def test_a_look_ahead_does_not_use_the_link_up(door: Door) -> None:
    given = link(door.url)
    assert httpx.head(door.url + given["path"], trust_env=False, timeout=60).status_code == 401
    assert door.get(given["path"], **NAVIGATES).status_code == 200


def test_a_link_is_good_for_minutes() -> None:
    now = 0.0
    keys = PageAuth(lambda: now)
    early, late = keys.new_link(), keys.new_link()
    now = LINK_SECONDS - 1
    assert keys.use(early)
    now = LINK_SECONDS + 1
    assert not keys.use(late)
    assert not keys.use("") and not keys.use("another")


def test_the_cookie_is_for_no_script_no_other_site_and_this_place_alone(door: Door) -> None:
    said = door.get(link(door.url)["path"], **NAVIGATES).headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", f"Path={door.place}"} < set(said)
    assert len(door.place) > 25 and not any(it.startswith(("Expires", "Max-Age", "Domain")) for it in said)


def test_the_token_is_in_no_address_and_in_no_page(door: Door) -> None:
    given = link(door.url)
    entered = door.get(given["path"], **NAVIGATES)
    texts = [json.dumps(given), entered.text, str(entered.headers), door.place]
    texts += [door.seen(name).text for name in ("", "data/runs.json")]
    texts += [door.seen(f"{door.data}/{name}.json").text for name in ("run", "steps", "step-3")]
    assert not [it for it in texts if TOKEN in it]


@pytest.mark.parametrize("name", ["", "page.js", "data/runs.json", "run", "steps", "step-1", "search"])
def test_without_cookie_or_token_there_is_nothing_to_see(door: Door, name: str) -> None:
    name = name if "." in name or not name else f"{door.data}/{name}.json"
    for headers in ({}, NAVIGATES, {"Cookie": f"{COOKIE}=guessed"}, {"Authorization": "Bearer guessed"}):
        answer = door.get(door.place + name, **headers)
        assert answer.status_code == 401, headers
        assert "dev" not in answer.text and "policy" not in answer.text
    for path in ("/page", "/page/", "/page/link", "/page/anything/data/runs.json"):
        assert door.get(path).status_code == 401


def test_a_program_that_needs_no_key_elsewhere_needs_it_here(door: Door) -> None:
    assert door.get("/v1/models").status_code == 200  # under --arbor
    assert httpx.post(f"{door.url}/page/link", trust_env=False, timeout=60).status_code == 401
    assert door.get(f"{door.place}{door.data}/run.json").status_code == 401


def test_with_the_token_a_program_reads_the_same(door: Door) -> None:
    assert door.get(f"{door.place}{door.data}/run.json", **SHOWN).json()["run"]["label"] == "dev"
    assert door.get("/page/elsewhere/data/runs.json", **SHOWN).status_code == 404


def test_the_cookie_reads_the_page_and_opens_nothing_else(door: Door) -> None:
    cookie = {"Cookie": f"{COOKIE}={door.cookie}", **OWN}
    assert door.seen("data/runs.json").status_code == 200
    assert door.get("/v1/models", **cookie).status_code == 401
    assert door.get("/slipway/status", **cookie).status_code == 401
    for method in ("POST", "PUT", "DELETE"):
        for path in (f"{door.place}data/runs.json", "/page/link", "/slipway/steps"):
            answer = httpx.request(method, door.url + path, headers=cookie, trust_env=False, timeout=60)
            assert answer.status_code in (401, 405), (method, path)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://localhost:9999"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Host": "evil.example"},
    ],
)
def test_another_page_reads_nothing_even_with_the_cookie(door: Door, headers: dict[str, str]) -> None:
    answer = door.seen(f"{door.data}/run.json", **headers)
    assert answer.status_code == 403 and "dev" not in answer.text
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_every_answer_forbids_what_is_not_its_own(door: Door) -> None:
    for answer in (
        door.seen(""),
        door.seen(f"{door.data}/steps.json"),
        door.get("/page"),
        door.seen("nothing"),
    ):
        assert answer.headers["Content-Security-Policy"] == page_files.POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in page_files.POLICY and "unsafe" not in page_files.POLICY


def test_the_page_shows_what_the_run_the_runtime_and_the_door_say(door: Door) -> None:
    head = door.seen(f"{door.data}/run.json").json()
    assert head["runtime"]["phase"] == "ready" and head["lease"]["left_seconds"] == 800.0
    assert head["door"]["connected"] in (True, False)
    assert door.seen(f"{door.data}/steps.json").json()["steps"] == [1, 2, 3]
    said = door.seen(f"{door.data}/step-2.json")
    assert said.headers["Content-Type"].startswith("application/json")
    assert any(MARKUP in it["completion"] for it in said.json()["lines"])
    found = door.seen(f"{door.data}/search.json?text=MOVED%20TO%20Friday").json()
    assert found and {it["found"] for it in found} == {"moved to Friday"}
    assert door.seen("").headers["Content-Type"].startswith("text/html")


@pytest.mark.parametrize(
    "name",
    [
        "../token",
        "..%2ftoken",
        "data/../../token",
        "data/slip-00000000/run.json",
        "data/slip-00000000/../../x.json",
        "data/runs%2ejson",
        "ORIGIN",
        "data/",
    ],
)
def test_no_name_leads_out_of_the_page(door: Door, name: str) -> None:
    head = f"GET {door.place}{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {COOKIE}={door.cookie}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", door.port), timeout=30) as client:
        client.sendall(head.encode())
        answer = client.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 404"), answer


def test_a_body_that_comes_with_a_look_is_not_read(door: Door) -> None:
    head = f"POST /page/link HTTP/1.1\r\nHost: 127.0.0.1\r\n{SHOWN_LINE}Content-Length: 33554432\r\n\r\n"
    with socket.create_connection(("127.0.0.1", door.port), timeout=30) as client:
        client.sendall(head.encode())
        answer = client.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 200") and "connection: close" in answer.lower()


def test_programs_are_answered_while_the_page_reads(store: RecordStore) -> None:
    class Slow(Pages):
        def runs(self) -> dict[str, object]:
            reading.set()
            assert go_on.wait(30)
            return {}

    reading, go_on = threading.Event(), threading.Event()
    record = store.load("dev")
    with upstream_in_a_folder() as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN, page=Slow(store, record.id))
        url = f"http://127.0.0.1:{relay.start()}"
        try:
            place = link(url)["page"]
            looking = threading.Thread(
                target=lambda: httpx.get(
                    f"{url}{place}data/runs.json", headers=SHOWN, trust_env=False, timeout=60
                )
            )
            looking.start()
            assert reading.wait(30)
            assert (
                httpx.get(f"{url}/v1/models", headers=SHOWN, trust_env=False, timeout=60).status_code == 200
            )
            go_on.set()
            looking.join(30)
        finally:
            go_on.set()
            relay.stop()


def test_a_door_without_a_page_has_none() -> None:
    with upstream_in_a_folder() as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN)
        url = f"http://127.0.0.1:{relay.start()}"
        try:
            assert httpx.get(f"{url}/page/", trust_env=False, timeout=60).status_code == 401
        finally:
            relay.stop()


def test_a_page_that_is_open_hears_how_the_run_ended_when_programs_have_no_endpoint_any_more(
    store: RecordStore, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token opens nothing then, and the port is closed once the page has heard."""
    monkeypatch.setattr("launcher.proxy.relay._END_SECONDS", 60.0)  # a loaded computer is waited for
    record = played_run(store, "ending", steps=2, ended=False)
    heard: list[httpx.Response] = []
    with upstream_in_a_folder() as upstream:
        pages = Pages(store, record.id)
        relay = Relay(upstream.socket, 0, token=TOKEN, page=pages)
        url = f"http://127.0.0.1:{relay.start()}"
        given, unused = link(url), link(url)
        entered = httpx.get(url + given["path"], headers=NAVIGATES, trust_env=False, timeout=60)
        cookie = {"Cookie": entered.headers["Set-Cookie"].partition(";")[0], **OWN}
        place = url + given["page"]

        def ask(name: str) -> httpx.Response:
            return httpx.get(f"{place}data/{name}.json", headers=cookie, trust_env=False, timeout=60)

        listening = threading.Thread(target=lambda: heard.append(ask(f"{record.id}/end")))
        listening.start()
        while not relay._page or not relay._page.waiting:
            time.sleep(0.01)
        relay.close_to_programs()
        while httpx.get(f"{url}/v1/models", headers=SHOWN, trust_env=False, timeout=60).status_code != 410:
            time.sleep(0.01)
        assert httpx.post(f"{url}/page/link", headers=SHOWN, trust_env=False, timeout=60).status_code == 401
        assert (
            httpx.get(f"{place}data/runs.json", headers=SHOWN, trust_env=False, timeout=60).status_code == 401
        )
        late = httpx.get(url + unused["path"], headers=NAVIGATES, trust_env=False, timeout=60)
        assert late.status_code == 401 and "Set-Cookie" not in late.headers
        assert ask(f"{record.id}/run").json()["run"]["down"] is None and not heard
        proof = {"verified": True, "detail": "no process is left"}
        store.update(record.id, state="verified", ended=record.created + 60, proof=proof)
        relay.show_end()
        listening.join(30)
        (answer,) = heard
        assert answer.json()["run"]["run"]["down"] == proof and answer.json()["steps"]["steps"] == [1, 2]
        assert [it["name"] for it in answer.json()["texts"]["files"]] == ["step-1", "step-2"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/v1/models", trust_env=False, timeout=60)


def test_without_a_page_that_waits_the_port_is_closed_at_once(store: RecordStore) -> None:
    record = played_run(store, "alone", steps=1, ended=False)
    with upstream_in_a_folder() as upstream:
        relay = Relay(upstream.socket, 0, token=TOKEN, page=Pages(store, record.id))
        url = f"http://127.0.0.1:{relay.start()}"
        relay.close_to_programs()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/v1/models", trust_env=False, timeout=60)
        relay.show_end()  # harmless
