"""Arbor's server by its names: here it is the run that this program was started in.

`launch` started it and `launch` ends it, so `init` finds it and `shutdown` ends nothing. Neighbours:
`job_watching.py` has the jobs, `arbor_provider.py` the LMs; `session.py` talks to the run. Knows no DSPy.
"""

from __future__ import annotations

import importlib
import os
import shlex
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from launcher.client.arbor.stderr_log import log, log_once
from launcher.client.failures import NotConnected, Refused
from launcher.client.launch_line import launch_hint, line_with
from launcher.client.request_bodies import REQUEST_HEADER
from launcher.client.session import Session, connect
from launcher.client.wire import new_request_id

_CONFIG = Path("~/.arbor/config.yaml")
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_lock = threading.RLock()
_session: Session | None = None
_info: dict[str, Any] | None = None


def init(
    host: str = "127.0.0.1",
    port: int | None = None,
    storage_path: str | None = None,
    auto_config: bool = True,
    silent: bool = False,
    **ignored: Any,
) -> dict[str, Any]:
    """The run as Arbor describes its server: `host, port, storage_path, config_path, base_url`, no more.

    The run decides all of it; an argument that differs is logged once. A second call gives the same. Raises
    NotConnected outside a run, with the line that starts one.
    """
    global _info
    with _lock:
        is_new = _info is None
        found = _info or _server_info(session())
        _info = found
    _log_ignored(found, host, port, storage_path, ignored)
    if is_new and not silent:
        log(f"using the run at {found['base_url']}; its results are in {found['storage_path']}")
    return dict(found)


def start(*words: Any, **named: Any) -> dict[str, Any]:
    """The same as `init`."""
    return init(*words, **named)


def start_server(model: str | None = None, **named: Any) -> dict[str, Any]:
    """`init`, and a check that the run has this model. Arbor had this name in earlier versions.

    Raises Refused if the run has another one.
    """
    log_once("start_server() is an old name; arbor.init() is enough, because the run has its model already")
    found = init(**named)
    if model is not None:
        check_model(session(), model)
    return found


def shutdown() -> None:
    """Ends nothing: the run is `launch`'s. A line tells how to end it."""
    global _info, _session
    with _lock:
        run, _info, _session = _session, None, None
    if run is None:
        log("init() was not called, so there is nothing to shut down")
        return
    log(f"the run goes on until this program ends, or until you end it: launch down {_run_name(run)}")


def stop() -> None:
    """The same as `shutdown`."""
    shutdown()


def status() -> dict[str, Any] | None:
    """The result of `init`, or None before it and after `shutdown`."""
    with _lock:
        return dict(_info) if _info is not None else None


def get_client() -> Any:
    """An `openai.OpenAI` that talks to the run. Raises ImportError if `openai` is not installed."""
    try:
        openai = importlib.import_module("openai")
    except ImportError as error:
        raise ImportError(
            "arbor.get_client() needs the package openai, which is not installed here: pip install openai"
        ) from error
    run = session()
    return openai.OpenAI(base_url=f"{run.base_url}/", api_key=run.api_key)


def session() -> Session:
    """The hold on this program's run. Raises NotConnected with the line that starts one."""
    global _session
    with _lock:
        if _session is None:
            try:
                _session = connect()
            except NotConnected as error:
                raise NotConnected(error.message, _WHY, _launch_hint("--arbor")) from None
        return _session


def check_model(run: Session, name: str) -> None:
    """Raise Refused if this name (a hub name, `openai/arbor:…`) is not the run's model."""
    plain = name.removeprefix("openai/").removeprefix("arbor:")
    path = f"/v1/models/{quote(f'arbor:{plain}', safe='/:@+')}"
    answer = run.connection.wire.send("GET", path, None, {REQUEST_HEADER: new_request_id()})
    if not answer.is_error:
        return
    try:
        error = dict(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        error = {}
    why = str(error.get("message") or answer.text[:300])
    model = shlex.quote(plain)
    hint = line_with(f"--arbor --model {model}") or _launch_hint(f"--arbor --model {model}")
    raise Refused(f"The run does not train {plain}", answer.status_code, error, why, hint)


_WHY = "arbor.init() starts no server here: it finds the run that launch has started"


def _launch_hint(options: str) -> str:
    remark = '# and, before the notebook starts: eval "$(launch env dev)"'
    return launch_hint(options, in_notebook=f"launch {options} --name dev  {remark}")


def _server_info(run: Session) -> dict[str, Any]:
    address = urlsplit(run.base_url)
    config = _CONFIG.expanduser()
    return {
        "host": address.hostname,
        "port": address.port,
        "storage_path": str(run.run_dir) if run.run_dir else None,
        "config_path": str(config) if config.is_file() else None,
        "base_url": f"{run.base_url}/",
    }


def _log_ignored(
    found: dict[str, Any], host: str, port: int | None, storage_path: str | None, others: dict[str, Any]
) -> None:
    """Log each argument that the run decides, a line each."""
    if host not in {found["host"], *_LOOPBACK} or port not in (None, found["port"]):
        log_once(
            f"init(host={host!r}, port={port!r}) changes nothing: the run answers on "
            f"{found['host']}:{found['port']}, and only on this computer"
        )
    requested = {
        "init(storage_path=…)": storage_path,
        found["config_path"]: _configured_storage(found["config_path"]),
    }
    for whose, folder in requested.items():
        if folder is not None and folder != found["storage_path"]:
            log_once(f"{whose} names {folder}; the results are in the run's folder, {found['storage_path']}")
    if others:
        log_once(f"init() has no use for {', '.join(sorted(others))}: the run was started with its settings")


def _configured_storage(config: str | None) -> str | None:
    """The `storage_path` in Arbor's own configuration: the one key of it that means anything here."""
    if config is None:
        return None
    try:
        lines = Path(config).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "storage_path":
            return value.partition(" #")[0].strip().strip("'\"") or None
    return None


def _run_name(run: Session) -> str:
    return os.environ.get("LAUNCH_RUN_ID") or run.run_id
