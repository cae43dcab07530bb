"""The life of one run: plan → arm → push → setup → serve → connect → work → pull → down → verified.

Neighbours: `machines/base.py` is where it happens, `safety/` covers every way it may end, `relay.py` is the
program's door, `pulse.py` the heartbeat, `work.py` what happens between connect and pull.
Knows nothing of flags, of how a machine does what it is asked, or of how things look on the terminal.

The record is on disk and the guardian alive before anything else starts. Whatever happens after that, `_end`
runs: results home, everything down, proof. If this process is killed, the guardian does the last two.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import durable, log, rented, resume
from launcher.durable import Standing
from launcher.endpoint import RESULTS, Endpoint, drop_token, keep_token
from launcher.errors import (
    JobFailed,
    LaunchError,
    LimitReached,
    NotPulled,
    PreflightError,
    TeardownUnverified,
)
from launcher.failpoints import passing
from launcher.home import Home
from launcher.machines import wanted
from launcher.machines.base import Machine, Proof, PullReport
from launcher.output import Output
from launcher.request import Request
from launcher.safety import guardian, minder
from launcher.safety.lease import Limits
from launcher.safety.records import RecordStore, RunRecord
from launcher.signals import Interrupted, Signals
from launcher.summary import Summary, exit_code_of, program_code_of, reason_of
from launcher.timings import Timings

if TYPE_CHECKING:
    from launcher.homeward import Homeward
    from launcher.pulse import Pulse
    from launcher.relay import Relay
    from runtime.schema import RuntimeConfig

_AGAIN = " (again: leave it to the guardian)"
# Each of these may take longer than a run may, and none looks at the clock; the work does by itself.
_ON_THE_WAY_UP = ("arm", "push", "setup", "serve", "connect")


class Run:
    """One run. `machine` makes its machine from the fresh record."""

    def __init__(
        self,
        request: Request,
        home: Home,
        output: Output,
        machine: Callable[[RunRecord, RecordStore, Home], Machine] = wanted.local_machine,
    ) -> None:
        self._request = request
        self._home = home
        self._output = output
        self._make_machine = machine
        self._store = RecordStore(home)
        self._timings = Timings(home.timings)
        self._begun_at = time.monotonic()
        self._machine: Machine | None = None
        self._guardian: guardian.Guardian | None = None
        self._relay: Relay | None = None
        self._pulse: Pulse | None = None
        self._homeward: Homeward | None = None
        self._token: str | None = None
        self._pulled: PullReport | None = None

    def execute(self) -> int:
        """Live it from beginning to end; the exit code. Raises LaunchError when nothing was started."""
        settings, plan = self._request.settings, self._request.plan
        with Signals(self._output.say_at_once) as self._signals:
            self._record = self._write_ahead()
            self._label = settings.name or self._record.id
            self._folder = self._store.folder(self._record.id)
            log.open_log(self._folder / "launch.log")
            self._limits = Limits(self._begun_at, plan.deadline_seconds, plan.budget, plan.price_per_hour)
            return self._end(self._live())

    def _write_ahead(self) -> RunRecord:
        """The record, on disk before anything it will have to answer for."""
        settings = self._request.settings
        resumed, command = self._request.resumed, self._request.command
        details = {"plan": self._request.plan.to_dict(), "openai_env": settings.openai_env}
        details |= resume.details(settings, self._request.model_path, self._request.folder)
        try:
            if resumed is not None:
                drop_token(self._store.folder(resumed.record.id))
                return self._store.reopen(resumed.record.id, command=command, details=details)
            return self._store.create(name=settings.name, command=command, details=details)
        except OSError as error:
            hint = "LAUNCH_HOME=/a/folder/of/yours launch …"
            raise PreflightError(f"cannot write under {self._store.runs}", error.strerror, hint) from error

    # -------------------------------------------------------------- beginning

    def _live(self) -> BaseException | None:
        """Everything until the work is over; what ended it, None when all went well."""
        try:
            with self._signals.raising():
                passing("cli.recorded")
                machine = self._arm()
                token, socket = self._serve(machine)
                self._work(machine, self._connect(machine, token, socket))
        except (Interrupted, LaunchError) as ended:
            return self._as_limit(ended)
        except Exception as bug:  # noqa: BLE001 - whatever it is, everything must still come down
            self._output.traceback(show=False)
            return LaunchError(
                "launch has a bug", f"{type(bug).__name__}: {bug}", f"less {self._folder / 'launch.log'}"
            )
        return None

    def _arm(self) -> Machine:
        """Record and guardian first, then the place itself and the runtime's environment."""
        plan, resumed = self._request.plan, self._request.resumed
        taken_up = f" · {resumed.describe()}" if resumed else ""
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
        machine = self._machine = self._make_machine(self._record, self._store, self._home)
        self._update(machine=machine.describe())
        self._guardian = guardian.start(self._store.path(self._record.id))
        self._update(guardian=self._guardian.process)
        passing("cli.guarded")
        self._signals.consequence = f"taking everything down{_AGAIN}"
        with self._phase("arm") as progress:
            machine.arm(progress)
            if resumed is not None and resumed.rewinds:
                machine.seed(self._folder / RESULTS)
        if plan.rented is not None:
            yes = self._request.settings.yes
            price = rented.announce(self._output, machine, plan, self._label, self._store.runs, yes)
            # What it really costs counts, from the beginning of the run.
            self._limits = replace(self._limits, price_per_hour=price)
        passing("cli.armed")
        with self._phase("push"):
            machine.push()
        with self._phase("setup") as progress:
            machine.setup(progress)
        return machine

    def _serve(self, machine: Machine) -> tuple[str, Path]:
        """The runtime runs and is ready: its token and its socket here."""
        token = self._token = secrets.token_urlsafe(32)
        log.REDACTOR.hide([token])
        self._signals.consequence = f"bringing the logs home, taking everything down{_AGAIN}"
        with self._phase("serve") as progress:
            socket = machine.serve(self._runtime_config(machine), token, progress)
        passing("cli.served")
        return token, socket

    def _connect(self, machine: Machine, token: str, socket: Path) -> Endpoint:
        """The relay listens, the runtime answers through it, the heart beats, steps become durable."""
        from launcher.homeward import Homeward
        from launcher.pulse import Pulse
        from launcher.relay import REPLAY_SECONDS, Relay

        settings, plan = self._request.settings, self._request.plan
        with self._phase("connect"):
            patience = rented.patience_seconds(plan, REPLAY_SECONDS)
            relay = self._relay = Relay(socket, settings.port, patience)
            root = f"http://127.0.0.1:{relay.start()}"
            pulse = self._pulse = Pulse(root, token, settings.lease_seconds)
            pulse.start()
            keep_token(self._folder, token)
            self._update(url=root)
        results = self._folder / RESULTS
        results.mkdir(mode=0o700, exist_ok=True)
        self._homeward = Homeward(machine, results)
        self._homeward.start()
        return Endpoint(root, token, self._record.id, results, settings.openai_env)

    # -------------------------------------------------------------- work

    def _work(self, machine: Machine, endpoint: Endpoint) -> None:
        from launcher.work import SILENT_AT_MOST_SECONDS, Watched, Work

        assert self._pulse is not None  # _connect made both
        assert self._homeward is not None
        command = self._request.command
        self._enter("work")
        self._say_ready(endpoint)
        program = None
        if command:
            environ = endpoint.environ(os.environ)
            grace = self._request.settings.grace_seconds
            program = minder.start(command, environ, self._request.folder, grace)
            self._update(minder=program.process)
        passing("cli.started")
        ending = "ending the program, " if command else ""
        self._signals.consequence = f"{ending}results home, everything down{_AGAIN}"
        watched = Watched(
            self._label,
            self._begun_at,
            self._limits,
            self._request.plan.budget,
            self._pulse,
            machine.ended,
            self._homeward.now,
            rented.patience_seconds(self._request.plan, SILENT_AT_MOST_SECONDS),
            self._request.settings.grace_seconds,
        )
        Work(watched, program, shlex.join(command), self._output).do()

    def _say_ready(self, endpoint: Endpoint) -> None:
        lines = [f"ready: {endpoint.base_url} · model {endpoint.variables()['LAUNCH_MODEL']}"]
        if not self._request.command:
            lines.append(f'  in another terminal: eval "$(launch env {self._label})"')
            lines.append("  Ctrl-C here brings the results home and takes everything down")
        self._output.event(
            "ready",
            "\n".join(lines),
            base_url=endpoint.base_url,
            model=endpoint.variables()["LAUNCH_MODEL"],
            run_dir=str(endpoint.run_dir),
        )

    # -------------------------------------------------------------- the end

    def _end(self, failure: BaseException | None) -> int:
        """Results home, everything down, proof; then say how it was. The exit code."""
        if self._machine is None:
            return self._say_end(failure, Proof(True, "nothing had been started"))
        if isinstance(failure, LaunchError):
            self._output.warn(f"{failure.message}; ending the run")
        self._signals.consequence = f"already ending: results home, everything down{_AGAIN}"
        unpulled = self._pull(self._machine)
        passing("cli.pulled")
        proof = self._down(self._machine)
        failure = failure or unpulled
        if self._signals.received is not None and failure is None:
            failure = Interrupted(self._signals.received)
        return self._say_end(failure, proof)

    def _pull(self, machine: Machine) -> NotPulled | None:
        """The results home, if there is a runtime to have any; the reason when they stay where they are."""
        if self._homeward is not None:
            self._homeward.stop()
        if self._pulse is not None:
            self._pulse.look()
        if self._token is None:
            return None
        try:
            with self._phase("pull"):
                self._pulled = machine.pull(self._folder / RESULTS)
        except NotPulled as error:
            self._output.warn(f"{error.message}: {error.why}")
            results, lease = self._folder / RESULTS, self._request.settings.lease_seconds
            pulled = rented.pull_later(self._output, machine, results, self._limits, lease, self._signals)
            if pulled is None:
                return error
            self._pulled = pulled
        for skipped in self._pulled.skipped:
            self._output.warn(f"not brought home: {skipped}")
        return None

    def _down(self, machine: Machine) -> Proof:
        with self._phase("down"):
            if self._pulse is not None:
                self._pulse.stop()
            if self._relay is not None:
                self._relay.stop()
            drop_token(self._folder)
            machine.down()
            return machine.proof()

    def _say_end(self, failure: BaseException | None, proof: Proof) -> int:
        """Finish the record, let the guardian go, and say how it was."""
        if not proof.verified:
            # The guardian is not released: when this process ends it tries again.
            failure = TeardownUnverified(
                "not everything is proven to be down", proof.detail, f"launch down {self._label}"
            )
        code = exit_code_of(failure)
        passing("cli.downed")
        self._update(
            state="verified" if proof.verified else "unverified",
            ended=time.time(),
            ended_by="launch",
            reason=reason_of(failure),
            exit_code=program_code_of(failure, self._request.command),
            proof=proof.to_dict(),
        )
        if self._guardian is not None and proof.verified:
            self._guardian.release()
        if isinstance(failure, LaunchError):
            self._output.error(failure)
        self._summary(failure, proof, code).say(self._output)
        return code

    # -------------------------------------------------------------- small things

    def _summary(self, failure: BaseException | None, proof: Proof, code: int) -> Summary:
        seconds = time.monotonic() - self._begun_at
        return Summary(
            run_id=self._record.id,
            name=self._record.name,
            seconds=seconds,
            cost=self._cost(),
            status=self._pulse.now().status if self._pulse is not None else None,
            results=self._pulled.into if self._pulled is not None else None,
            proof=proof,
            reason=reason_of(failure),
            exit_code=code,
            program_exit_code=program_code_of(failure, self._request.command),
            standing=self._standing(),
        )

    def _cost(self) -> float:
        """What it has cost; nothing where no machine came up."""
        if self._machine is None or self._machine.price_per_hour is None:
            return 0.0
        return self._limits.cost(time.monotonic())

    def _standing(self) -> Standing:
        """Where the run stands at its end: what is on the machine, what is at home."""
        if self._machine is None:
            return Standing()
        committed = self._machine.committed()
        if committed is None and self._pulled is not None:  # a rented machine is gone with what it had
            committed = self._pulled.step
        return Standing(committed, durable.newest_step(self._folder / RESULTS))

    def _runtime_config(self, machine: Machine) -> RuntimeConfig:
        from launcher import runtime_config

        settings, gpus = self._request.settings, self._request.plan.rented
        overrides = settings.runtime
        if gpus is not None and machine.device == "cuda":
            overrides = rented.runtime_overrides(gpus) | overrides
        return runtime_config.build(
            overrides,
            run_id=self._record.id,
            model_path=self._request.model_path,
            device=machine.device,
            state_dir=machine.state_dir,
            socket_dir=machine.socket_dir,
            lease_seconds=settings.lease_seconds,
            deadline_seconds=self._limits.left(time.monotonic()),
            wandb_mode=settings.wandb,
        )

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """One phase: in the record before it begins, on the screen while it lasts, its time remembered."""
        self._enter(name)
        assert self._machine is not None
        begun = time.monotonic()
        with self._output.phase(name, self._timings.usual(self._machine.kind, name)) as progress:
            yield progress
        self._timings.add(self._machine.kind, name, time.monotonic() - begun)

    def _enter(self, state: str) -> None:
        reached = self._limits.reached(time.monotonic())
        if reached and state not in ("pull", "down"):
            raise LimitReached(reached, f"before {state}", "launch --max TIME --budget DOLLARS …")
        left = self._limits.left(time.monotonic()) if state in _ON_THE_WAY_UP else None
        self._signals.alarm(left)
        self._update(state=state)

    def _update(self, **changes: Any) -> None:
        self._record = self._store.update(self._record.id, **changes)

    def _as_limit(self, ended: BaseException) -> BaseException:
        """A runtime that the keeper ended at the deadline looks like a failure; it is the deadline. On the
        way up it is the alarm."""
        reached = self._limits.reached(time.monotonic())
        if isinstance(ended, Interrupted) and ended.number == signal.SIGALRM:
            why = f"the run had got as far as {self._record.state}"
            return LimitReached(
                reached or "the deadline is reached", why, "launch --max TIME --budget DOLLARS …"
            )
        if reached and isinstance(ended, JobFailed) and ended.job_exit_code is None:
            return LimitReached(reached, ended.message, "launch --max TIME --budget DOLLARS …")
        return ended
