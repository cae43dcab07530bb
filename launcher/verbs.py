"""What the verbs do to runs that were started before: status, logs, pull, down, gc, env, config.

Neighbours: `commands.py` calls these, `safety/records.py` knows the runs, `safety/reap.py` ends them,
`output.py` prints.
Imports no HTTP library and no pydantic where the answer is on this disk.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import consent, durable
from launcher.endpoint import RESULTS, Endpoint, is_open, token_file
from launcher.errors import EXIT_OK, LaunchError, NotPulled, UsageError, suggestion
from launcher.home import Home
from launcher.output import Output, columns
from launcher.safety import processes, reap
from launcher.safety.records import STATES, RecordStore, RunRecord
from launcher.settings import SETTINGS
from launcher.units import format_duration, format_money, parse_duration

_STATUS_SECONDS = 5.0
# `down` lets the run's own `launch` end it: results home, runtime in order.
_ORDERLY_SECONDS = 180.0
_FOLLOW_EVERY_SECONDS = 0.25
_SLOW_SECONDS = 10.0
# A run in one of these is on its way to an endpoint.
_STARTING = STATES[: STATES.index("work")]
_LAUNCHER_LOGS = ("launch", "guardian")


def status(output: Output, name: str | None) -> int:
    """All runs from their records; one run with what its runtime says."""
    store = RecordStore(Home.find())
    if name is not None:
        return _status_of(output, store, store.load(name))
    records = store.list()
    for unreadable in store.unreadable():
        output.note(f"{unreadable.path} cannot be read: {unreadable.why}")
    rows = [["NAME", "ID", "STATE", "AGE", "ENDPOINT"]]
    for record in records:
        age = format_duration(time.time() - record.created)
        rows.append([record.name or "-", record.id, _state(record), age, _url(record) or "-"])
    text = columns(rows) if records else "no runs yet: launch -- python my_program.py"
    output.result({"runs": [_described(record, store) for record in records]}, text)
    return EXIT_OK


def logs(output: Output, name: str, which: str, follow: bool) -> int:
    """One log of a run, to its end or as long as the run lives."""
    store = RecordStore(Home.find())
    record = store.load(name)
    if record.machine.get("kind") == "cloud" and record.live and which not in _LAUNCHER_LOGS:
        from launcher import remote_verbs

        if (code := remote_verbs.log(store, record, which, follow)) is not None:
            return code
    path = _log_file(store.folder(record.id), name, which)
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            now = store.load(record.id)
            lives = now.live and now.attended
            while piece := file.read(65536):
                output.raw(piece)
            if not (follow and lives):
                return EXIT_OK
            time.sleep(_FOLLOW_EVERY_SECONDS)


def pull(output: Output, name: str) -> int:
    """Bring home what there is now."""
    store = RecordStore(Home.find())
    with _a_word_when_slow(output, f"still bringing home {name}, or waiting for another pull of it"):
        report = reap.pull(store, store.load(name))
    for skipped in report.skipped:
        output.note(f"not brought home: {skipped}")
    step = "no step yet" if report.step is None else f"step {report.step}"
    output.result(
        {
            "into": str(report.into),
            "files": report.files,
            "bytes": report.bytes,
            "seconds": round(report.seconds, 3),
            "step": report.step,
            "skipped": list(report.skipped),
        },
        f"{report.into}: {step}, {report.files} files, {report.bytes / 1e6:.1f} MB",
    )
    return EXIT_OK


def down(output: Output, name: str) -> int:
    """End a run, whoever started it, and prove it. Raises NotPulled when results went with it."""
    store = RecordStore(Home.find())
    missed: list[str] = []
    record = store.load(name)
    if record.live and record.launch is not None and record.launch.alive():
        output.note(f"telling launch (pid {record.launch.pid}) to end {name}")
        record.launch.send(signal.SIGTERM)
        record.launch.send(signal.SIGCONT)  # it may be stopped (Ctrl-Z): then it would not hear the first
        processes.wait_gone(record.launch, _ORDERLY_SECONDS)
        record = store.load(record.id)
    record = reap.after_guardian(store, record, output.note)
    if record.live:
        with _a_word_when_slow(output, f"still ending {name}"):
            record = reap.take_down(store, record, "down", missed.append)
    proof = record.proof or {"verified": True, "detail": "nothing had been started"}
    said = f"{name} is down: verified ({proof['detail']})"
    if missed and record.url is not None:  # it had been ready, so it had something
        hint = f"launch status {name}   (what was durable is in its results)"
        raise NotPulled(f"{said}; its newest results did not come home", missed[-1], hint)
    for line in missed:
        output.note(line)
    output.result({"run_id": record.id, "down": proof}, said)
    return EXIT_OK


def gc(output: Output, older_than: str | None, unpulled: bool, yes: bool, infra: Sequence[str] = ()) -> int:
    """Show what is left of runs and take it away, once that was agreed to. The clouds in `infra` are asked
    besides those that runs were on."""
    try:
        seconds = None if older_than is None else parse_duration(older_than)
    except ValueError as error:
        what = f"--older-than: {older_than!r} does not fit"
        raise UsageError(what, str(error), "launch gc --older-than 7d") from None
    home = Home.find()
    finds = reap.look(home, seconds, unpulled, seconds or reap.IDLE_SECONDS)
    at_providers, unasked = _at_providers(output, home, infra)
    finds += at_providers
    rows = [["LEFT", "WHY"], *([find.what, find.why] for find in finds)]
    if not finds:
        known = f"; what {', '.join(unasked)} has is not known" if unasked else ""
        nothing = {"found": [], "removed": False, "unasked": unasked}
        output.result(nothing, f"nothing is left of earlier runs{known}")
    elif yes or _agreed(output, columns(rows), len(finds)):
        return _remove(output, finds, unasked)
    else:
        shown = "" if consent.can_ask(output) else columns(rows)
        found = {"found": [find.to_dict() for find in finds], "removed": False, "unasked": unasked}
        output.result(found, shown)
        output.note("nothing was removed: launch gc --yes")
    return EXIT_OK


def env(output: Output, name: str, wait: bool = False) -> int:
    """What a shell must export; on a terminal without the token itself. `wait`: once the run has it."""
    store = RecordStore(Home.find())
    with _a_word_when_slow(output, f"{name} is starting: waiting for its endpoint"):
        record, endpoint = _endpoint(store, name, wait)
    path = token_file(store.folder(record.id))
    data = {
        "base_url": endpoint.base_url,
        "api_key_file": str(path),
        "model": endpoint.variables()["LAUNCH_MODEL"],
        "run_id": record.id,
        "run_dir": str(endpoint.run_dir),
    }
    output.result(data, endpoint.exports(path if sys.stdout.isatty() else None))
    return EXIT_OK


def config(output: Output, flags: Mapping[str, Any], sets: tuple[str, ...], env_file: Path | None) -> int:
    """Every setting, its value and its source."""
    from launcher.config import load

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


def _at_providers(output: Output, home: Home, infra: Sequence[str]) -> tuple[list[reap.Find], list[str]]:
    """Machines at providers, and who could not be asked: nobody is where nothing was ever rented."""
    from launcher.safety import rented

    asked = [*rented.clouds(home), *infra]
    if not asked:
        return [], []
    output.note(f"asking {', '.join(sorted(set(asked)))} for machines of earlier runs")
    return rented.look(home, asked, output.note)


@contextlib.contextmanager
def _a_word_when_slow(output: Output, text: str) -> Iterator[None]:
    """Nobody looks at a silent screen for long."""
    timer = threading.Timer(_SLOW_SECONDS, output.note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _agreed(output: Output, shown: str, count: int) -> bool:
    """Show what would go and ask; without a terminal nobody is asked, and nothing goes."""
    if not consent.can_ask(output):
        return False
    output.note(shown)
    return consent.agreed(output, f"remove {'this' if count == 1 else f'these {count}'}?")


def _remove(output: Output, finds: list[reap.Find], unasked: list[str]) -> int:
    """Take each away and say how it went; the first failure decides the exit code."""
    failure: LaunchError | None = None
    described: list[dict[str, Any]] = []
    rows = [["LEFT", "NOW"]]
    for find in finds:
        try:
            done = find.remove()
        except LaunchError as error:
            failure = failure or error
            done = f"NOT removed: {error.message}: {error.why}"
        described.append(find.to_dict() | {"done": done})
        rows.append([find.what, done])
    output.result({"found": described, "removed": failure is None, "unasked": unasked}, columns(rows))
    if failure is not None and not output.as_json:
        output.error(failure)
    return failure.exit_code if failure is not None else EXIT_OK


def _status_of(output: Output, store: RecordStore, record: RunRecord) -> int:
    runtime, trouble = _ask_runtime(store, record)
    rows = [
        ["run", f"{record.id}" + (f" ({record.name})" if record.name else "")],
        ["state", _state(record)],
        ["age", format_duration(time.time() - record.created)],
        ["program", " ".join(record.command) or "none: the endpoint is held"],
        ["endpoint", _url(record) or "-"],
        ["folder", str(store.folder(record.id))],
    ]
    if standing := record.machine.get("standing"):
        rows.append(["machine", _rented(record, standing)])
    if record.machine:
        rows.append(["steps", _standing(record, store).describe()])
    if record.exit_code is not None:
        rows.append(["exit code", f"{record.exit_code} (the program's)"])
    if record.reason:
        rows.append(["reason", record.reason])
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
    output.result({"run": _described(record, store), "runtime": runtime}, text)
    return EXIT_OK


def _ask_runtime(store: RecordStore, record: RunRecord) -> tuple[dict[str, Any] | None, str | None]:
    """The runtime's own status through the relay; or why there is none although the run lives."""
    import json
    import urllib.error
    import urllib.request

    try:
        endpoint = Endpoint.of(record, store)
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
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state,
        "live": record.live,
        "attended": record.attended,
        "created": record.created,
        "ended": record.ended,
        "ended_by": record.ended_by,
        "reason": record.reason,
        "exit_code": record.exit_code,
        "command": list(record.command),
        "base_url": f"{_url(record)}/v1" if _url(record) else None,
        "folder": str(store.folder(record.id)),
        "down": record.proof,
        "price_per_hour": (record.machine.get("standing") or {}).get("price_per_hour"),
        **_standing(record, store).to_dict(),
    }


def _rented(record: RunRecord, standing: Mapping[str, Any]) -> str:
    price = standing["price_per_hour"]
    cost = price * ((record.ended or time.time()) - record.created) / 3600
    so_far = f"{format_money(price)}/h, {format_money(cost)} so far"
    return f"{standing['where']} · {standing['instance_type']} · {so_far}"


def _standing(record: RunRecord, store: RecordStore) -> durable.Standing:
    """What is committed and what is durable, by the folders on this computer."""
    machine = Path(record.machine.get("state_dir", store.folder(record.id) / "machine"))
    return durable.standing(machine, store.folder(record.id) / RESULTS)


def _state(record: RunRecord) -> str:
    """The state, and what it means where nobody looks after a live run."""
    if not record.live:
        return "down: verified"
    return (
        record.state
        if record.attended
        else f"{record.state}, left alone: launch down {record.name or record.id}"
    )


def _url(record: RunRecord) -> str | None:
    return record.url if is_open(record) else None


def _log_file(folder: Path, name: str, which: str) -> Path:
    if which in _LAUNCHER_LOGS:
        found = {which: folder / f"{which}.log"}
    else:
        # The machine's own files while they are here, else what came home.
        found = {path.stem: path for path in sorted((folder / RESULTS / "logs").glob("*.log"))}
        found |= {path.stem: path for path in sorted((folder / "machine" / "logs").glob("*.log"))}
    if which in found and found[which].exists():
        return found[which]
    known = [*_LAUNCHER_LOGS, *found]
    meant = suggestion(which, known) or "launch"
    raise UsageError(
        f"{name} has no log {which}", f"it has {', '.join(known)}", f"launch logs {name} --which {meant}"
    )


def _endpoint(store: RecordStore, name: str, wait: bool) -> tuple[RunRecord, Endpoint]:
    """A run's endpoint; with `wait`, the one that a starting run is about to have. Raises UsageError."""
    while True:
        record = store.load(name)
        try:
            return record, Endpoint.of(record, store)
        except UsageError as none_now:
            if not (is_open(record) and record.state in _STARTING):
                raise
            if not wait:
                why = f"it is starting: {record.state}"
                raise UsageError(none_now.message, why, f"launch env {name} --wait") from None
        time.sleep(_FOLLOW_EVERY_SECONDS)


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return SETTINGS[key].show(value) if key in SETTINGS else str(value)
