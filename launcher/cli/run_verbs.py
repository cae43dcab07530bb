"""The verbs about runs that were started: status, logs, pull, env, config.

Neighbours: `commands.py` calls these, `teardown_verbs.py` has those that end a run, `records/records.py`
knows the runs, `output.py` prints. Imports no HTTP library and no pydantic if the answer is on this disk.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.base.errors import EXIT_OK, UsageError
from launcher.base.home import Home
from launcher.base.layout import columns, table
from launcher.base.log import rotated
from launcher.base.suggestions import closest_match
from launcher.base.units import format_duration, format_money
from launcher.cli import run_outcome
from launcher.console.output import Output, phase_name
from launcher.records.endpoint import RESULTS, LocalEndpoint, is_open, token_file
from launcher.records.log_files import LAUNCHER_LOGS, log_files
from launcher.records.records import STATES, RecordStore, RunRecord
from launcher.results import compile_records, trackio_process
from launcher.teardown import program_log, take_down
from launcher.types.settings import SETTINGS

_STATUS_SECONDS = 5.0
_FOLLOW_EVERY_SECONDS = 0.25
_SLOW_SECONDS = 10.0
# A run in one of these is on its way to an endpoint.
_STARTING = STATES[: STATES.index("work")]


def status(output: Output, name: str | None) -> int:
    """Show all runs from their records; or one run, with its runtime's own status."""
    store = RecordStore(Home.find())
    if name is not None:
        return _status_of(output, store, store.load(name))
    records = store.list()
    for unreadable in store.unreadable():
        output.note(f"{unreadable.path} cannot be read: {unreadable.why}")
    rows = [run_outcome.HEADING, *(run_outcome.row(record, store) for record in records)]
    text = table(rows, output.width) if records else "no runs yet: launch -- python my_program.py"
    output.result({"runs": [_described(record, store) for record in records]}, text)
    return EXIT_OK


def logs(output: Output, name: str, which: str | None, follow: bool) -> int:
    """Print one log of a run, to its end or as long as the run lives; without a name, the log that
    explains most."""
    store = RecordStore(Home.find())
    record = store.load(name)
    which = which or _most_relevant_log(store, record)
    if record.machine.get("kind") == "cloud" and record.live and which not in LAUNCHER_LOGS:
        from launcher.cli import remote_verbs

        if (code := remote_verbs.log(store, record, which, follow)) is not None:
            return code
    path = _log_file(store.folder(record.id), name, which)

    def going_on() -> bool:
        now = store.load(record.id)
        return follow and now.live and now.is_attended and not (now.elsewhere and now.silent)

    with output.stream_log() as write:
        if rotated(path).exists():
            _show(write, rotated(path), lambda: False)
        _show(write, path, going_on)
    return EXIT_OK


def pull(output: Output, name: str) -> int:
    """Download the results so far."""
    store = RecordStore(Home.find())
    with output.busy(f"copying the results of {name}", "or waiting for another pull to finish") as progress:
        record = store.load(name)
        report = take_down.pull(store, record, progress)
    for missing in report.missing:
        output.note(f"not copied: {missing}")
    if not record.launch_alive:  # its launch does it
        trackio_process.write(record, output.note)
    step = "no step yet" if report.step is None else f"step {report.step}"
    output.result(
        {
            "into": str(report.into),
            "files": report.files,
            "bytes": report.bytes,
            "seconds": round(report.seconds, 3),
            "step": report.step,
            "skipped": report.missing,
        },
        f"{report.into}: {step}, {report.files} files, {report.bytes / 1e6:.1f} MB",
    )
    return EXIT_OK


def env(output: Output, name: str, wait: bool = False) -> int:
    """The variables that a shell must export; on a terminal without the token itself. `wait`: wait until
    the run has them."""
    store = RecordStore(Home.find())
    with note_when_slow(output, f"{name} is starting: waiting for its endpoint"):
        record, endpoint = _endpoint(store, name, wait)
    path = token_file(store.folder(record.id))
    data = {
        "base_url": endpoint.base_url,
        "api_key_file": str(path),
        "model": endpoint.variables()["LAUNCH_MODEL"],
        "run_id": record.id,
        "run_dir": str(endpoint.run_dir),
        "patience_seconds": endpoint.timeout_budget_seconds,
    }
    output.result(data, endpoint.exports(path if sys.stdout.isatty() else None), verbatim=True)
    return EXIT_OK


def config(output: Output, flags: Mapping[str, Any], sets: tuple[str, ...], env_file: Path | None) -> int:
    """Every setting, its value and its source."""
    from launcher.config.setting_sources import load

    settings = load(flags, sets, env_file)
    for warning in settings.warnings:
        output.note(warning)
    rows = [["SETTING", "VALUE", "SOURCE"]]
    rows += [[key, _shown(key, value.value), value.source] for key, value in settings.values.items()]
    rows += [[name, "set", value.source] for name, value in settings.secrets.items()]
    data = {key: {"value": value.value, "source": value.source} for key, value in settings.values.items()}
    secrets = {name: {"set": True, "source": value.source} for name, value in settings.secrets.items()}
    output.result({"settings": data, "secrets": secrets}, columns(rows))
    return EXIT_OK


# ------------------------------------------------------------------ how


@contextlib.contextmanager
def note_when_slow(output: Output, text: str) -> Iterator[None]:
    """Print a note if an answer takes long."""
    timer = threading.Timer(_SLOW_SECONDS, output.note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _status_of(output: Output, store: RecordStore, record: RunRecord) -> int:
    runtime, trouble = _ask_runtime(store, record)
    rows = [
        ["run", f"{record.id}" + (f" ({record.name})" if record.name else "")],
        ["state", run_outcome.state(record)],
        *([["lives", f"on {record.location}"]] if record.elsewhere else []),
        ["duration", _duration(record)],
        ["model", run_outcome.model(record) or "-"],
        ["program", " ".join(record.command) or "none: only the endpoint runs"],
        ["endpoint", _url(record) or "-"],
        ["folder", str(store.folder(record.id))],
    ]
    if cluster_status := record.machine.get("standing"):
        rows.append(["machine", _rented(record, cluster_status)])
    if not record.rented:
        rows.append(["cost", f"{format_money(run_outcome.cost(record))}, nothing is rented"])
    so_far = run_outcome.progress(record, store)
    if record.machine:
        rows.append(["steps", so_far.durability.describe()])
    if so_far.reward is not None:
        rows.append(["reward", f"{so_far.reward:.3g} in the newest step"])
    trained = compile_records.of_run(store.folder(record.id) / RESULTS)
    rows += [["compile", f"{one.id} · {one.describe()}"] for one in trained]
    if record.unpulled:
        rows.append(["results", f"the newest were NOT copied: {record.unpulled}"])
    rows += [["trouble", trouble] for trouble in record.troubles]
    if record.exit_code is not None:
        rows.append(["exit code", f"{record.exit_code} (the program's)"])
    if record.reason:
        rows.append(["reason", f"{record.reason}: {record.why}" if record.why else record.reason])
    if record.proof:
        rows.append(
            ["down", "verified" if record.proof["verified"] else f"NOT VERIFIED: {record.proof['detail']}"]
        )
    if runtime is not None:
        lease = runtime.get("lease_left_seconds")
        rows.append(
            ["runtime", f"{runtime['phase']}, step {runtime['step']}, policy version {runtime['version']}"]
        )
        rows.append(["lease", "-" if lease is None else f"{format_duration(lease)} left"])
        for child in runtime.get("children", []):
            detail = f" ({child['detail']})" if child.get("detail") else ""
            rows.append([f"  {child['name']}", f"{child['state']}, restarts {child['restarts']}{detail}"])
    if trouble:
        rows.append(["runtime", trouble])
    width = max(len(row[0]) for row in rows)
    text = "\n".join(f"{label:<{width}}  {value}" for label, value in rows)
    by_compile = [one.to_dict() for one in trained]
    output.result({"run": _described(record, store), "runtime": runtime, "compiles": by_compile}, text)
    return EXIT_OK


def _ask_runtime(store: RecordStore, record: RunRecord) -> tuple[dict[str, Any] | None, str | None]:
    """The runtime's own status through the relay; or why there is none although the run lives."""
    import json
    import urllib.error
    import urllib.request

    try:
        endpoint = LocalEndpoint.of(record, store)
    except UsageError:
        return None, None
    request = urllib.request.Request(
        f"{endpoint.root}/slipway/status", headers={"Authorization": f"Bearer {endpoint.token}"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=_STATUS_SECONDS) as answer:
            return json.load(answer), None
    except (OSError, ValueError) as error:
        return None, f"does not answer: {error}"


def _described(record: RunRecord, store: RecordStore) -> dict[str, Any]:
    so_far = run_outcome.progress(record, store)
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state,
        "live": record.live,
        "attended": record.is_attended,
        "elsewhere": record.location if record.elsewhere else None,
        "created": record.created,
        "ended": record.ended,
        "ended_by": record.ended_by,
        "reason": record.reason,
        "why": record.why,
        "exit_code": record.exit_code,
        "command": list(record.command),
        "base_url": f"{_url(record)}/v1" if _url(record) else None,
        "folder": str(store.folder(record.id)),
        "down": record.proof,
        "price_per_hour": (record.machine.get("standing") or {}).get("price_per_hour"),
        "cost": run_outcome.cost(record),
        "lives": [asdict(life) for life in record.lives],
        "unpulled": record.unpulled,
        "troubles": list(record.troubles),
        "outcome": run_outcome.outcome(record),
        "model": run_outcome.model(record),
        "steps": so_far.steps,
        "reward": so_far.reward,
        "seconds": round(run_outcome.seconds(record), 3),
        **so_far.durability.to_dict(),
    }


def _duration(record: RunRecord) -> str:
    """How long this life has lasted, and all lives together if there were more."""
    together = format_duration(run_outcome.seconds(record))
    if not record.earlier_lives:
        return together
    until = record.now() if record.ended is None else record.ended
    newest = format_duration(until - record.life.begun)
    return f"{newest} since start number {len(record.lives)}, {together} in all"


def _rented(record: RunRecord, cluster_status: Mapping[str, Any]) -> str:
    of_life = format_money(record.life.cost(record.now()))
    so_far = f"{format_money(cluster_status['price_per_hour'])}/h, {of_life} so far"
    if record.earlier_lives:
        so_far += f", {format_money(run_outcome.cost(record))} since its first start"
    return f"{cluster_status['where']} · {cluster_status['instance_type']} · {so_far}"


def _url(record: RunRecord) -> str | None:
    return record.url if is_open(record) else None


def _most_relevant_log(store: RecordStore, record: RunRecord) -> str:
    """The log that explains the end of a run: the program's output if the program failed and printed
    anything."""
    program_output = store.folder(record.id) / program_log.FILE
    return (
        "program"
        if record.exit_code and program_output.is_file() and program_output.stat().st_size
        else "launch"
    )


def _log_file(folder: Path, name: str, which: str) -> Path:
    found = log_files(folder)
    if which in found:
        return found[which]
    known = [*dict.fromkeys((*LAUNCHER_LOGS, *found))]
    meant = closest_match(which, known) or "launch"
    raise UsageError(
        f"{name} has no log {which}", f"it has {', '.join(known)}", f"launch logs {name} --which {meant}"
    )


def _show(write: Callable[[str], None], path: Path, going_on: Callable[[], bool]) -> None:
    """Print a file to its end, and new lines while the run goes on; a full file is replaced by a new one
    of its name."""
    while True:
        with path.open(encoding="utf-8", errors="replace") as file:
            while True:
                more, replaced = going_on(), _was_replaced(path, file.fileno())
                while piece := file.read(65536):
                    write(piece)
                if replaced:
                    break
                if not more:
                    return
                time.sleep(_FOLLOW_EVERY_SECONDS)


def _was_replaced(path: Path, descriptor: int) -> bool:
    """Whether the name belongs to another file by now."""
    try:
        return path.stat().st_ino != os.fstat(descriptor).st_ino
    except OSError:
        return False


def _endpoint(store: RecordStore, name: str, wait: bool) -> tuple[RunRecord, LocalEndpoint]:
    """A run's endpoint; with `wait`, the one that a starting run is about to have. Raises UsageError."""
    while True:
        record = store.load(name)
        try:
            return record, LocalEndpoint.of(record, store)
        except UsageError as none_now:
            if not (is_open(record) and record.state in _STARTING):
                raise
            if not wait:
                why = f"it is still starting: {phase_name(record.state)}"
                raise UsageError(none_now.message, why, f"launch env {name} --wait") from None
        time.sleep(_FOLLOW_EVERY_SECONDS)


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return SETTINGS[key].show(value) if key in SETTINGS else str(value)
