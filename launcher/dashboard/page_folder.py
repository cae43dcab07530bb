"""A run's page as a folder: plain files that open from a disk, with no server and no network.

    results/page/index.html  page.js …       the page's own files
    results/page/data/run.js  steps.js       the run's summary and its steps
    results/page/data/step-000007.js         a step's rollout texts: read when the page shows them

A browser lets a page on a disk load only scripts from its folder, so each piece of data is a script that
hands one value over. Neighbours: `launch open` asks; `run_page_data.py` has the values.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError
from launcher.dashboard import page_files
from launcher.dashboard.run_page_data import RunPageData

FOLDER = "page"
# Marks in `index.html`: the folder holds all data of a saved page, whose policy also allows a disk's own
# files.
_LIVE = '<html lang="en" data-kept="no">'
_SAVED = '<html lang="en" data-kept="yes">'
_HEAD = '<meta charset="utf-8">'
_SELF = "'self'"


def write(page: RunPageData, results: Path) -> Path:
    """Write the folder again; returns its `index.html`. The folder is complete, or as it was before.
    Raises PreflightError."""
    target = results / FOLDER
    aside, old = results / f".{FOLDER}.new", results / f".{FOLDER}.old"
    try:
        for path in (aside, old):
            shutil.rmtree(path, ignore_errors=True)
        _fill(page, aside)
        if target.exists():
            target.rename(old)
        aside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise PreflightError(
            f"cannot write {target}", error.strerror or str(error), f"df -h {results}"
        ) from error
    return target / page_files.INDEX


def _fill(page: RunPageData, folder: Path) -> None:
    data = folder / "data"
    data.mkdir(mode=0o700, parents=True)
    for name in (*page_files.NAMES, page_files.LICENCE):
        (folder / name).write_bytes(page_files.read(name))
    (folder / page_files.INDEX).write_bytes(_saved_index())
    _write_data(data, "run", page.summary())
    _write_data(data, "steps", page.steps(at_once=None))
    for step in page.steps_with_texts():
        _write_data(data, f"step-{step}", page.step_rollouts(step))


def _saved_index() -> bytes:
    text = page_files.read(page_files.INDEX).decode()
    policy = page_files.POLICY.replace(_SELF, f"{_SELF} file:").replace("; frame-ancestors 'none'", "")
    head = f'{_HEAD}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return text.replace(_LIVE, _SAVED, 1).replace(_HEAD, head, 1).encode()


def _write_data(data: Path, name: str, value: Any) -> None:
    script = b'slipwayData("%b", %b);\n' % (name.encode(), page_files.as_json(value))
    (data / f"{name}.js").write_bytes(script)
