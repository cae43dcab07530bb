"""`launch open`: a run's page in the browser; from its endpoint while it lives, else from the files at home.
Without a run, all of them: to choose, and to compare.

Neighbours: `commands.py` calls, `proxy/page_routes.py` lets the browser in, `dashboard/page_folder.py` makes
the folder. The link that lets a browser in is in no command line, because other users of this computer could
read it there. The browser opens a file of this user's instead, which goes on to the link.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
import webbrowser
from html import escape
from pathlib import Path
from typing import Any

from launcher.base import atomic
from launcher.base.errors import EXIT_OK, LaunchError, PreflightError
from launcher.base.home import Home
from launcher.base.units import format_duration
from launcher.console.output import Output
from launcher.dashboard import page_folder
from launcher.dashboard.pages import Pages
from launcher.records.endpoint import RESULTS, LocalEndpoint, is_open
from launcher.records.records import RecordStore, RunRecord

_ANSWER_SECONDS = 10.0
_REDIRECT_PAGE = "open.html"


def open_page(output: Output, name: str | None, in_browser: bool) -> int:
    """The page's address is the answer, opened where there is a screen."""
    store = RecordStore(Home.find())
    if name is None:
        return _open_all(output, store, in_browser)
    record = store.load(name)
    silent: LaunchError | None = None
    if is_open(record):
        try:
            return _open_live(output, store, record, in_browser)
        except LaunchError as error:  # as while a run ends: its relay is closed before it is proven down
            silent = error
    file = _saved_page(output, store, record, silent)
    if silent is not None:
        output.note(f"{silent.message}: {silent.why}; showing the files on this computer")
    opened = in_browser and _has_screen() and webbrowser.open(file.as_uri())
    output.result({"file": str(file), "live": False, "opened": opened}, str(file))
    return EXIT_OK


def _open_all(output: Output, store: RecordStore, in_browser: bool) -> int:
    """The page of all runs: figures and settings. A run's texts and logs are in its own."""
    pages = Pages(store)
    if not pages.ids():
        raise PreflightError("there is no run yet", "nothing was launched here", "launch -- python hello.py")
    with output.busy("writing the page of all runs", "the figures of each run go into it"):
        file = page_folder.write(pages, store.runs.parent / page_folder.FOLDER, texts=False)
    opened = in_browser and _has_screen() and webbrowser.open(file.as_uri())
    output.result({"file": str(file), "live": False, "opened": opened}, str(file))
    return EXIT_OK


def _open_live(output: Output, store: RecordStore, record: RunRecord, in_browser: bool) -> int:
    endpoint = LocalEndpoint.of(record, store)
    link, seconds = _link(endpoint, record.name or record.id)
    way = store.folder(record.id) / _REDIRECT_PAGE
    opened = in_browser and _has_screen() and _write_redirect(way, link)
    lasts = format_duration(seconds)
    if opened:
        output.note(f"opened in your browser; if it is not there, this link is good once, for {lasts}:")
    else:
        output.note(f"open this in a browser of this computer: it is good once, for {lasts}")
    output.result({"url": link, "live": True, "opened": opened}, link)
    return EXIT_OK


def _link(endpoint: LocalEndpoint, label: str) -> tuple[str, float]:
    """The link that lets one browser in, and how long it is valid. Raises PreflightError."""
    request = urllib.request.Request(
        f"{endpoint.root}/page/link", method="POST", headers={"Authorization": f"Bearer {endpoint.token}"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=_ANSWER_SECONDS) as answer:
            given: dict[str, Any] = json.load(answer)
        return endpoint.root + given["path"], float(given["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PreflightError(
            f"the endpoint of {label} did not give a link to its page", str(error), f"launch status {label}"
        ) from error


def _write_redirect(way: Path, link: str) -> bool:
    address = escape(link)
    text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}">'
    try:
        atomic.write(way, f'{text}<a href="{address}">The run\'s page</a>\n', private=True)
    except OSError:  # a full disk: the link is printed all the same
        return False
    return webbrowser.open(way.as_uri())


def _saved_page(
    output: Output, store: RecordStore, record: RunRecord, silent: LaunchError | None = None
) -> Path:
    """The page as files. Raises if there is nothing to see; `silent` is why the endpoint does not answer,
    if it does not."""
    label, pages = record.name or record.id, Pages(store, record.id, [record.id])
    with output.busy(f"writing the page of {label}", "the page is made of the files on this computer"):
        if pages.of(record.id).is_empty:
            raise silent or PreflightError(
                f"there is nothing to show for {label}",
                "none of its steps, validations and proofs is on this computer",
                f"launch logs {label}",
            )
        return page_folder.write(pages, store.folder(record.id) / RESULTS / page_folder.FOLDER)


def _has_screen() -> bool:
    """Whether a browser could open a window; without a screen Python might start one in the terminal."""
    if sys.platform == "darwin" or os.environ.get("BROWSER"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
