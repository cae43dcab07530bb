"""The page's data of all runs on this computer, by the names that the page asks for.

    runs             every run: what it was, how far it came, its settings
    slip-…/run       and so on: a piece of one run's (`run_page_data.py`)

Neighbours: `proxy/page_routes.py` serves it while a run lives, `page_folder.py` keeps it as a folder. Used
from one thread at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.base.errors import LaunchError
from launcher.dashboard.run_page_data import RunPageData
from launcher.records import lives
from launcher.records.records import RecordStore, RunRecord
from launcher.results.rollout_texts import redact
from launcher.results.run_history import CompileScores, RunHistory

_OF_RUN = re.compile(r"(slip-[0-9a-f]{8})/(.+)")
_LOG = re.compile(r"log-([\w.-]{1,64})")
_TEXTS = re.compile(r"step-\d{1,12}|empty-\d{1,12}-\d{1,6}|validation-\d{1,12}-[\w.-]{1,64}")

# Runs whose figures are kept in memory.
_MAX_PAGES = 8

Query = Mapping[str, str]


class Pages:
    """All runs, or those of `only`; `current`: the run that the page begins with."""

    def __init__(
        self, store: RecordStore, current: str | None = None, only: Iterable[str] | None = None
    ) -> None:
        self._store = store
        self.current = current
        self._only = None if only is None else [*only]
        # Of the runs that were looked at last.
        self._pages: dict[str, RunPageData] = {}
        self._rows: dict[str, tuple[str, dict[str, Any]]] = {}

    def of(self, run_id: str) -> RunPageData:
        """One run's data."""
        page = self._pages.pop(run_id, None) or RunPageData(self._store, run_id)
        self._pages[run_id] = page
        while len(self._pages) > _MAX_PAGES:
            del self._pages[next(iter(self._pages))]
        return page

    def ids(self) -> list[str]:
        """The runs, the newest first."""
        if self._only is not None:
            return self._only
        return [it.id for it in sorted(self._store.list(), key=lambda it: it.created, reverse=True)]

    def get(
        self,
        name: str,
        query: Query | None = None,
        runtime: Mapping[str, Any] | None = None,
        relay: Mapping[str, Any] | None = None,
    ) -> Any:
        """The piece of that name; None if there is none. `runtime`, `relay`: of the current run."""
        if name == "runs":
            return self.runs()
        named = _OF_RUN.fullmatch(name)
        if named is None or not self._knows(named[1]):
            return None
        live = (runtime, relay) if named[1] == self.current else (None, None)
        return self._of_run(self.of(named[1]), named[2], query or {}, *live)

    def runs(self) -> dict[str, Any]:
        """Every run, and which of them the page begins with."""
        found = [self._listed(self._store.load(run_id)) for run_id in self.ids()]
        return {"now": time.time(), "current": self.current, "runs": redact(found)}

    def _knows(self, run_id: str) -> bool:
        if self._only is not None:
            return run_id in self._only
        try:
            return self._store.load(run_id).id == run_id
        except LaunchError:
            return False

    def _of_run(
        self,
        page: RunPageData,
        name: str,
        query: Query,
        runtime: Mapping[str, Any] | None,
        relay: Mapping[str, Any] | None,
    ) -> Any:
        match name:
            case "run":
                return page.run(runtime, relay)
            case "steps":
                return page.steps()
            case "texts":
                return page.texts()
            case "settings":
                return page.settings()
            case "logs":
                return page.logs()
            case "search" if query.get("text"):
                return [*page.rollouts.search(query["text"])]
            case "like" if _TEXTS.fullmatch(query.get("file", "")):
                return [*page.rollouts.like(query["file"], query.get("group", ""), query.get("member", ""))]
        if named := _LOG.fullmatch(name):
            start = query.get("start", "")
            return page.log(named[1], int(start) if start.isdigit() else None)
        return page.step_rollouts(name) if _TEXTS.fullmatch(name) else None

    def _listed(self, record: RunRecord) -> dict[str, Any]:
        """A run's row. Its figures are read again only when a file has changed."""
        page = self._pages.get(record.id) or RunPageData(self._store, record.id)
        revision = f"{page.revision(record)} {len(record.lives)}"
        known = self._rows.get(record.id)
        if known is None or known[0] != revision:
            settings = {it["name"]: it["value"] for it in page.settings()}
            figures = _figures(page.history(record)) | {"settings": settings}
            known = self._rows[record.id] = (revision, figures)
        plan = record.details.get("plan") or {}
        return {
            "id": record.id,
            "label": record.name or record.id,
            "model": str(plan.get("model") or ""),
            "where": str(plan.get("where") or ""),
            "command": " ".join(record.command),
            "state": record.state,
            "live": record.live and record.is_attended,
            "reason": record.reason,
            "exit_code": record.exit_code,
            "begun": record.created,
            "seconds": lives.seconds(record.lives, record.now()),
            "cost": lives.cost(record.lives, record.now()),
            **known[1],
        }


def _figures(history: RunHistory) -> dict[str, Any]:
    return {
        "steps": history.steps[-1] if history.steps else 0,
        "empty": len(history.empty),
        "alarms": [it.name for it in history.alarms],
        **_scores(history),
    }


def _scores(history: RunHistory) -> dict[str, Any]:
    """The first and the newest reward, and the scores of the newest compile that was validated."""
    rewards = [it for it in history.column("reward") if it is not None]
    trained: CompileScores | None = history.trained[-1] if history.trained else None
    scores = None
    if trained is not None:
        parts = {"before": trained.before, "after": trained.after, "best": trained.best}
        scores = {name: [it.score, it.standard_error, it.version] for name, it in parts.items()}
    return {"reward": [rewards[0], rewards[-1]] if rewards else None, "validation": scores}
