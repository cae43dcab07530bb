"""The page of one or several runs as a folder: plain files that open from a disk, with no server and no
network.

    page/index.html  page.js …              the page's own files
    page/data/runs.js                       the runs
    page/data/slip-…/run.js  steps.js …     a run's data, piece by piece (`run_page_data.py`)
    page/data/slip-…/step-7.js              a step's rollout texts: read when the page shows them

A browser lets a page on a disk load only scripts from its folder, so each piece of data is a script that
hands one value over. Neighbours: `launch open` and `launch report` ask; `pages.py` has the values.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError
from launcher.dashboard import page_files
from launcher.dashboard.pages import Pages

FOLDER = "page"
# Of a log's end.
_LOG_BYTES = 256 * 2**10
# Marks in `index.html`: the folder holds all data of a saved page, whose policy also allows a disk's own
# files.
_LIVE = '<html lang="en" data-kept="no">'
_SAVED = '<html lang="en" data-kept="yes">'
_HEAD = '<meta charset="utf-8">'
_SELF = "'self'"


def write(pages: Pages, target: Path, *, texts: bool = True) -> Path:
    """Write the folder again; returns its `index.html`. It is complete, or as it was before. Without `texts`
    it has no rollouts and no logs. Raises PreflightError."""
    aside, old = (target.with_name(f".{target.name}.{part}") for part in ("new", "old"))
    try:
        for path in (aside, old):
            shutil.rmtree(path, ignore_errors=True)
        _fill(pages, aside, texts)
        if target.exists():
            target.rename(old)
        aside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise PreflightError(
            f"cannot write {target}", error.strerror or str(error), f"df -h {target.parent}"
        ) from error
    return target / page_files.INDEX


def is_page(folder: Path) -> bool:
    """Whether this is such a folder, which may be written again."""
    return (folder / page_files.INDEX).is_file() and (folder / "data" / "runs.js").is_file()


def _fill(pages: Pages, folder: Path, texts: bool) -> None:
    data = folder / "data"
    data.mkdir(mode=0o700, parents=True)
    for name in (*page_files.NAMES, page_files.LICENCE):
        (folder / name).write_bytes(page_files.read(name))
    (folder / page_files.INDEX).write_bytes(_saved_index())
    _write_data(data, "runs", pages.runs() | {"texts": texts})
    for run_id in pages.ids():
        page = pages.of(run_id)
        (data / run_id).mkdir(mode=0o700)
        pieces: dict[str, Any] = {"run": page.run(), "settings": page.settings()}
        pieces["steps"] = page.steps()
        pieces["texts"] = page.texts(at_once=None) if texts else {"revision": "", "more": False, "files": []}
        if texts:
            pieces["logs"] = page.logs()
            pieces |= {f"log-{it['name']}": page.log(it["name"], None, _LOG_BYTES) for it in page.logs()}
        for name, value in pieces.items():
            _write_data(data, f"{run_id}/{name}", value)
        for name in page.rollouts.names() if texts else ():
            _write_data(data, f"{run_id}/{name}", page.step_rollouts(name))


def _saved_index() -> bytes:
    text = page_files.read(page_files.INDEX).decode()
    policy = page_files.POLICY.replace(_SELF, f"{_SELF} file:").replace("; frame-ancestors 'none'", "")
    head = f'{_HEAD}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return text.replace(_LIVE, _SAVED, 1).replace(_HEAD, head, 1).encode()


def _write_data(data: Path, name: str, value: Any) -> None:
    script = b"slipwayData(%b, %b);\n" % (page_files.as_json(name), page_files.as_json(value))
    (data / f"{name}.js").write_bytes(script)
