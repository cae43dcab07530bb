"""The life of one run: plan → provision → push → setup → serve → connect → work → pull → down → verified.

Neighbours: `types/machine.py` is the machine's protocol, `teardown/` covers every way it may end, `relay.py`
is the program's endpoint, `runtime_monitor.py` renews the lease, `work.py` is the work phase, `ending.py` the
phases after it. Knows nothing of flags, of a machine's inner workings, or of the terminal's look.

The record is on disk and the guardian alive before anything else starts. After that, `ending.py` always runs
last: results home, everything down, proof. If this process is killed, the guardian does it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.backends.runtime_start import start_seconds
from launcher.base import clock, embedded_models, log, timeout_budget
from launcher.base.errors import (
    JobFailed,
    LaunchError,
    LimitReached,
    NotStarted,
    PreflightError,
    as_launch_error,
)
from launcher.base.failpoints import failpoint
from launcher.base.home import Home
from launcher.config import resume_source
from launcher.console.output import Output, phase_name
from launcher.records import heartbeat
from launcher.records.endpoint import (
    RESULTS,
    LocalEndpoint,
    delete_token,
    keyless_option,
    save_token,
    wanted_port,
)
from launcher.records.lease import LONGER_LIMIT_HINT, Limits
from launcher.records.records import RecordStore, RunRecord
from launcher.results import durable, trackio_process
from launcher.run import machine_from_plan, rented_run
from launcher.run.ending import ONE_MORE_CTRL_C, Ending
from launcher.run.phase_times import PhaseTimes
from launcher.run.run_components import EndingRun, RunComponents
from launcher.run.run_request import RunRequest
from launcher.run.signals import Interrupted, Signals
from launcher.teardown import guardian, minder, program_log
from launcher.types.machine import Machine

if TYPE_CHECKING:
    from launcher.run.work import WatchedRun
    from runtime.shared.runtime_config import RuntimeConfig

# Each of these may take longer than a run may, and none looks at the clock; the work does by itself.
_ON_THE_WAY_UP = ("arm", "push", "setup", "serve", "connect")


class Run:
    """One run. `machine` makes its machine from the fresh record."""

    def __init__(
        self,
        request: RunRequest,
        home: Home,
        output: Output,
        machine: Callable[[RunRecord, RecordStore, Home], Machine] = machine_from_plan.local_machine,
    ) -> None:
        self._request = request
        self._home = home
        self._output = output
        self._make_machine = machine
        self._store = RecordStore(home)
        self._timings = PhaseTimes(home.timings)
        self._begun_at = clock.boot_seconds()
        self._parts = RunComponents()

    def execute(self) -> int:
        """Run it from beginning to end; returns the exit code. Raises LaunchError when nothing was
        started."""
        settings, plan = self._request.settings, self._request.plan
        with Signals(self._output.write_from_signal_handler) as self._signals:
            self._record = self._write_record()
            self._label = settings.name or self._record.id
            self._folder = self._store.folder(self._record.id)
            until = (plan.deadline_seconds, settings.budget, plan.price_per_hour, plan.spent)
            self._limits = Limits(self._begun_at, *until)
            with heartbeat.keep_beating(self._folder):
                return self._end(self._run_phases())

    def _end(self, failure: BaseException | None) -> int:
        command, lease_seconds = self._request.command, self._request.settings.lease_seconds
        ended = EndingRun(self._record, self._label, command, lease_seconds, self._limits)
        ending = Ending(ended, self._parts, self._store, self._output, self._signals, self._timings)
        return ending.end(failure)

    def _write_record(self) -> RunRecord:
        """The record, on disk before anything it will have to answer for."""
        settings = self._request.settings
        resumed, command = self._request.resumed, self._request.command
        details: dict[str, Any] = {"plan": self._request.plan.to_dict()}
        details |= {"openai_env": settings.openai_env, "arbor": settings.arbor, "art": settings.art}
        if settings.trackio:
            details |= trackio_process.details_of(os.environ)
        details |= resume_source.record_details(settings, self._request.model_path, self._request.folder)
        try:
            if resumed is not None:
                delete_token(self._store.folder(resumed.record.id))
                return self._store.reopen(resumed.record.id, command=command, details=details)
            return self._store.create(name=settings.name, command=command, details=details)
        except OSError as error:
            hint = "set LAUNCH_HOME to a folder of yours"
            raise PreflightError(f"cannot write under {self._store.runs}", error.strerror, hint) from error

    # -------------------------------------------------------------- beginning

    def _run_phases(self) -> BaseException | None:
        """All phases until the work is over; returns the failure that ended it, None if all went well."""
        try:
            with self._signals.raising():
                log.open_log(self._folder / "launch.log")
                failpoint("cli.recorded")
                machine = self._provision()
                token, socket = self._serve(machine)
                self._work(machine, self._connect(machine, token, socket))
        except (Interrupted, LaunchError) as ended:
            return self._as_limit(ended)
        except Exception as bug:  # noqa: BLE001 - after any error everything must still come down
            self._output.traceback(show=False)
            return as_launch_error(bug, self._folder / "launch.log")
        return None

    def _provision(self) -> Machine:
        """Record and guardian first, then the place itself and the runtime's environment."""
        plan, resumed = self._request.plan, self._request.resumed
        taken_up = f" · {resumed.describe()}" if resumed else ""
        if plan.rented and plan.adapter:  # the line of a rented run names no model
            taken_up += f" · {plan.trained_model}"
        self._output.event(
            "run",
            f"{self._label} · {plan.describe_cost() if plan.rented else plan.describe()}{taken_up}",
            run_id=self._record.id,
            name=self._record.name,
            plan=plan.to_dict(),
            folder=str(self._folder),
            log=str(self._folder / "launch.log"),
            resumed_after=resumed.step if resumed else None,
            rewound=resumed.rewinds if resumed else False,
        )
        machine = self._parts.machine = self._make_machine(self._record, self._store, self._home)
        self._update(machine=machine.describe())
        watch = self._parts.guardian = guardian.start(self._store.path(self._record.id))
        self._update(guardian=watch.process)
        failpoint("cli.guarded")
        self._signals.consequence = f"taking everything down{ONE_MORE_CTRL_C}"
        with self._phase("arm") as progress:
            machine.provision(progress)
        if plan.rented is not None:
            yes = self._request.settings.yes
            price = rented_run.announce(self._output, machine, plan, self._label, self._store.runs, yes)
            # The real price counts, from the beginning of the run.
            self._limits = replace(self._limits, price_per_hour=price)
        failpoint("cli.armed")
        with self._phase("push") as progress:
            machine.push()
            self._upload_checkpoints(machine, progress)
        with self._phase("setup") as progress:
            machine.setup(progress)
        return machine

    def _upload_checkpoints(self, machine: Machine, progress: Callable[[str], None]) -> None:
        """Give the machine the run's checkpoints or initial adapter, unless it has them."""
        resumed, results = self._request.resumed, self._folder / RESULTS
        if resumed is not None and resumed.rewinds:
            if resumed.step == 0 and resumed.record.may_have_results:
                durable.mark_served(results)
            machine.upload_checkpoints(results, progress)
        elif resumed is None and (adapter := self._request.settings.adapter) is not None:
            progress(f"starting from the adapter {adapter.folder}")
            durable.save_initial_adapter(results, adapter.folder)
            machine.upload_checkpoints(results, progress)

    def _serve(self, machine: Machine) -> tuple[str, Path]:
        """The runtime runs and is ready: its token and its socket here."""
        token = secrets.token_urlsafe(32)
        log.REDACTOR.hide([token])
        self._signals.consequence = f"copying the logs, taking everything down{ONE_MORE_CTRL_C}"
        with self._phase("serve") as progress:
            self._parts.served = True
            socket = machine.serve(self._runtime_config(machine), token, progress)
        failpoint("cli.served")
        return token, socket

    def _connect(self, machine: Machine, token: str, socket: Path) -> LocalEndpoint:
        """The relay listens, the runtime answers through it, the lease is renewed, steps become durable."""
        from launcher.dashboard.pages import Pages
        from launcher.proxy.relay import Relay
        from launcher.results.background_copy import BackgroundCopy
        from launcher.run.runtime_monitor import RuntimeMonitor

        settings, timeout_budget_seconds = self._request.settings, self._timeout_budget_seconds
        hint = f"launch logs {self._label} --which supervisor"
        with self._phase("connect") as progress:
            port = wanted_port(settings)
            page = Pages(self._store, self._record.id)
            by = keyless_option(settings)
            relay = self._parts.relay = Relay(socket, port, timeout_budget_seconds, token, by, page)
            root = f"http://127.0.0.1:{relay.start()}"
            monitor = self._parts.monitor = RuntimeMonitor(root, token, settings.lease_seconds, hint)
            monitor.start(timeout_budget_seconds, machine.ended, progress)
            save_token(self._folder, token)
            self._update(url=root)
        results = self._folder / RESULTS
        results.mkdir(mode=0o700, exist_ok=True)
        background_copy = self._parts.background_copy = BackgroundCopy(machine, results)
        background_copy.start()
        if settings.trackio:
            self._parts.trackio = trackio_process.start(self._record, self._output.note)
        run_id, told = self._record.id, (settings.openai_env, settings.arbor, settings.art)
        return LocalEndpoint(root, token, run_id, results, timeout_budget_seconds, *told)

    # -------------------------------------------------------------- work

    def _work(self, machine: Machine, endpoint: LocalEndpoint) -> None:
        """Run the program to its end; again, if it failed early and the user has fixed it."""
        from launcher.run.program_retry import ProgramRetry
        from launcher.run.work import Work

        self._enter("work")
        self._print_ready(endpoint)
        watched = self._watched(machine)
        parts = (self._request, self._label, self._limits, watched.monitor)
        another = ProgramRetry(*parts, lambda: Work(watched, None, "", self._output), self._output)
        while True:
            try:
                return self._run_program(watched, endpoint)
            except JobFailed as failed:
                self._signals.consequence = f"copying results, taking everything down{ONE_MORE_CTRL_C}"
                if not another.wait_for_key(failed):
                    raise

    def _run_program(self, watched: WatchedRun, endpoint: LocalEndpoint) -> None:
        from launcher.run.work import Work

        command = self._request.command
        program = None
        try:
            if command:
                after_step = self._request.resumed.step if self._request.resumed else 0
                environ = endpoint.environ(os.environ, after_step, self._line())
                grace = self._request.settings.grace_seconds
                kept = self._folder / program_log.FILE if self._request.settings.keep_output else None
                program = minder.start(command, environ, self._request.folder, grace, kept)
                self._update(minder=program.process)
            failpoint("cli.started")
            ending = "ending the program, " if command else ""
            self._signals.consequence = f"{ending}copying results, taking everything down{ONE_MORE_CTRL_C}"
            Work(watched, program, shlex.join(command), self._output).run()
        finally:
            if program is not None and program.poll() is None:
                program.terminate()

    def _line(self) -> str | None:
        """The line that started the run; None for a resumed one, whose settings are fixed."""
        return self._request.started_by if self._request.resumed is None else None

    def _watched(self, machine: Machine) -> WatchedRun:
        from launcher.results.program_progress import ProgramProgress
        from launcher.run.work import WatchedRun

        assert self._parts.monitor is not None  # _connect made both
        assert self._parts.background_copy is not None
        return WatchedRun(
            self._label, self._begun_at, self._limits, self._parts.monitor, machine.ended,
            self._parts.background_copy.latest, self._timeout_budget_seconds,
            self._request.settings.grace_seconds, ProgramProgress(self._folder / RESULTS).latest,
        )  # fmt: skip

    def _print_ready(self, endpoint: LocalEndpoint) -> None:
        model = endpoint.variables()["LAUNCH_MODEL"]
        lines = [f"ready: {endpoint.base_url} · model {model}"]
        key = "" if sys.platform == "linux" else ", with the run's key"
        if endpoint.arbor:
            lines.append(f"  your programs that were written for Arbor run as they are{key}")
        if endpoint.art:
            lines.append(f"  your programs that were written for ART run with our backend{key}")
        settings = self._request.settings
        if settings.trackio:
            project = str(settings.values["wandb_project"].value)
            lines.append(f"  Trackio: {trackio_process.view_command(self._record, project)}")
        if not self._request.command:
            lines.append(f'  in another terminal: eval "$(launch env {self._label})"')
            lines.append("  Ctrl-C here copies the results and takes everything down")
        ready = {"base_url": endpoint.base_url, "model": model, "run_dir": str(endpoint.run_dir)}
        self._output.event("ready", "\n".join(lines), **ready)

    # -------------------------------------------------------------- small things

    @property
    def _timeout_budget_seconds(self) -> float:
        plan = self._request.plan
        return timeout_budget.seconds(plan.lease_seconds, plan.rented is not None)

    def _runtime_config(self, machine: Machine) -> RuntimeConfig:
        from runtime.shared.peft_format import portable_name
        from runtime.shared.runtime_config import RuntimeConfig

        settings, gpus = self._request.settings, self._request.plan.gpus
        model_path, overrides = self._request.model_path, settings.runtime
        if gpus is not None and machine.device_type == "cuda":
            overrides = rented_run.runtime_overrides(gpus) | overrides
        ours = {
            "run_id": self._record.id,
            "model_path": model_path,
            "model_name": settings.model
            if embedded_models.is_embedded(settings.model)
            else portable_name(model_path),
            "device": machine.device_type,
            "state_dir": machine.state_dir,
            "socket_dir": machine.socket_dir,
            "lease_seconds": settings.lease_seconds,
            "deadline_seconds": self._limits.left(clock.boot_seconds()),
            "start_seconds": start_seconds(model_path, gpus.model_bytes if gpus is not None else None),
            "wandb_mode": settings.wandb,
            "wandb_name": self._record.name,
        }
        return RuntimeConfig.model_validate(overrides | ours)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """One phase: in the record before it begins, on the screen while it lasts, its time remembered."""
        self._enter(name)
        machine = self._parts.machine
        assert machine is not None  # every phase is one of a machine
        begun = time.monotonic()
        with self._output.phase(name, self._timings.usual(machine.kind, name)) as progress:
            yield progress
        self._timings.add(machine.kind, name, time.monotonic() - begun)

    def _enter(self, state: str) -> None:
        now = clock.boot_seconds()
        if reached := self._limits.reached(now):
            raise LimitReached(reached, f"before {state}", LONGER_LIMIT_HINT)
        self._signals.alarm(self._limits.left(now) if state in _ON_THE_WAY_UP else None)
        self._update(state=state)

    def _update(self, **changes: Any) -> None:
        self._record = self._store.update(self._record.id, **changes)

    def _as_limit(self, ended: BaseException) -> BaseException:
        """A runtime that the keeper ended at the deadline looks like a failure; it is the deadline. On the
        way up it is the alarm."""
        reached = self._limits.reached(clock.boot_seconds())
        if isinstance(ended, Interrupted) and ended.number == signal.SIGALRM:
            why = f"the run was still at: {phase_name(self._record.state)}"
            return LimitReached(reached or "the deadline has passed", why, LONGER_LIMIT_HINT)
        if isinstance(ended, JobFailed) and ended.job_exit_code is not None:
            return ended
        if reached and isinstance(ended, JobFailed | NotStarted):
            return LimitReached(reached, ended.message, LONGER_LIMIT_HINT)
        return ended
