"""The end of a run by its own launch: each step of `end_run` is taken even if others failed.

Neighbours: `run.py` begins it when the run's life is over, for any reason; `rented_run.py` keeps a machine
whose results are not home, `backends/machine_from_record.py` ends it, `summary.py` reports it. An error in
one step stops no other: it is shown, and recorded as one of the `troubles`. If proof or record fail here, the
guardian goes on; it is released only when both are done. Knows nothing of how a run lives.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from launcher.backends import machine_from_record
from launcher.base import clock
from launcher.base.errors import LaunchError, NotPulled, TeardownUnverified, as_launch_error, described
from launcher.base.failpoints import failpoint
from launcher.base.log import LOGGER
from launcher.console.output import Output
from launcher.records import lives, teardown_lock
from launcher.records.endpoint import RESULTS, delete_token
from launcher.records.records import RecordStore, end_fields
from launcher.records.teardown_lock import LockHandle
from launcher.results import durable
from launcher.run import rented_run
from launcher.run.phase_times import PhaseTimes
from launcher.run.run_components import EndingRun, RunComponents
from launcher.run.signals import Interrupted, Signals
from launcher.run.summary import Summary, exit_code_of, program_code_of, reason_of, why_of
from launcher.teardown import abandon_results, take_down
from launcher.teardown.end_run import COPYING_RESULTS, end_run
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import Machine, Progress, Proof, PullReport, Stopped, no_progress

T = TypeVar("T")

# The effect of a Ctrl-C after the first signal, whichever that was.
ONE_MORE_CTRL_C = " (one more Ctrl-C leaves it to the guardian)"
_ENDING = f"already ending: copying results, taking everything down{ONE_MORE_CTRL_C}"
_WAITING_FOR_RESULTS = "waiting for its results (Ctrl-C gives them up)"
# A record that cannot be written is tried again: another process may hold its lock for a moment.
_WRITES = 3
_PAUSE_SECONDS = 0.5


class Ending:
    """The end of one run, in this process: the `EndPolicy` of the run's own launch."""

    def __init__(
        self,
        run: EndingRun,
        components: RunComponents,
        store: RecordStore,
        output: Output,
        signals: Signals,
        timings: PhaseTimes,
    ) -> None:
        self._run = run
        self._components = components
        self._store = store
        self._output = output
        self._signals = signals
        self._timings = timings
        self._run_id = run.record.id
        self._folder = store.folder(self._run_id)
        self._results = self._folder / RESULTS
        self._by_name = abandon_results.was_requested(store, self._run_id)
        self._pulled: PullReport | None = None
        self._unpulled: NotPulled | None = None
        self._proof: Proof | None = None
        self._troubles: list[str] = []
        # Whether the record is still of this launch's life.
        self._ours = True
        self._program_code: int | None = None
        self._failure: BaseException | None = None

    def end(self, failure: BaseException | None) -> int:
        """Do all of it; `failure` ended the run's life, None if that went well. Returns the exit code."""
        self._failure = failure
        # By the run's life: the result of its end changes nothing about the program.
        self._program_code = program_code_of(failure, self._run.command)
        if self._components.machine is None:
            return self.write_record(Proof(True, "nothing was started"))
        if isinstance(failure, LaunchError):
            self._warn(f"{failure.message}; ending the run")
        self._signals.consequence = _ENDING
        with contextlib.ExitStack() as stack:
            alone = teardown_lock.exclusive(self._folder, "launch", self._warn, insist=True)
            lock = self._try("waiting for its turn", lambda: stack.enter_context(alone))
            lock = lock or LockHandle(None, "launch")
            code = self.ended_by_another()
            return end_run(lock, self) if code is None else code

    # -------------------------------------------------------------- steps

    def bring_home(self, lock: LockHandle) -> None:
        """Download the results, if there is a runtime that may have any; the reason, if they stay on the
        machine."""
        if self._components.background_copy is not None:
            self._try("ending the copies", self._components.background_copy.stop)
        if self._components.monitor is not None:
            self._try("asking the runtime for its last status", self._components.monitor.poll_now)
        if self._components.served:
            self._pull(self._machine(), lock)
        # Not caught: it stands for a launch that breaks off here and leaves the rest to its guardian.
        failpoint("cli.pulled")

    def _pull(self, machine: Machine, lock: LockHandle) -> None:
        try:
            stopped = abandon_results.after_grace(take_down.TRIES_SECONDS, self._by_name)
            with self._shown(machine, "pull") as progress:
                if self._run.record.logs_to_wandb:
                    self._try("ending its Weights & Biases run", machine.close_wandb)
                self._pulled = machine.pull(self._results, lock.reporting(COPYING_RESULTS, progress), stopped)
        except Exception as error:  # noqa: BLE001 - after any error the next step must be taken
            if self._pulled is not None:  # they are at home, it could not be shown
                self._add_trouble(f"showing pull failed: {described(error)}")
            else:
                self._unpulled = self._not_pulled(error)
                self._warn(f"{self._unpulled.message}: {self._unpulled.why}")
                self._try("keeping the machine", lambda: self._keep_machine(machine, lock))
        if self._pulled is not None:
            self._report_missing(self._pulled)

    def _report_missing(self, pulled: PullReport) -> None:
        """Report results that a lost machine took with it: such an end is no success."""
        for missing in pulled.missing:
            self._warn(f"not copied: {missing}")
        if pulled.lost is not None and self._components.background_copy is not None:  # it was ready once
            self._unpulled = NotPulled("the newest results are lost", pulled.lost, None)

    def _keep_machine(self, machine: Machine, lock: LockHandle) -> None:
        """Keep a machine whose disk would go with it, as long as the plan allows."""
        if self._components.background_copy is None:  # it was never ready: no program ever used it
            return
        given_up = self._results_abandoned()
        seconds = rented_run.keep_seconds(machine, self._run.limits, self._run.lease_seconds)
        if seconds <= 0 or given_up():
            return
        lock.report(teardown_lock.WAITING_FOR_RESULTS)
        self._signals.consequence = _WAITING_FOR_RESULTS
        keep = (self._warn, machine, self._results, seconds, self._run.label, given_up)
        try:
            self._pulled = rented_run.pull_while_kept(*keep)
        finally:
            self._signals.consequence = _ENDING
        if self._pulled is not None:
            self._unpulled = None

    def _results_abandoned(self) -> Stopped:
        """Whether the wait for results is over: by a Ctrl-C or `--give-up-results`. A TERM, or a closed
        terminal, does not end it."""
        received = self._signals.received
        return lambda: self._by_name() or (received is None and self._signals.received == signal.SIGINT)

    def ended_by_another(self) -> int | None:
        """The exit code, if another process has ended the run: this launch stood still, or went on beside
        one that did."""
        proof = self._proven_by_another()
        if proof is None:
            return None
        self._close_endpoint()
        return self.write_record(proof)

    def take_down(self) -> Proof:
        """Take it down and prove it, with progress; also if the progress cannot be shown."""
        machine = self._machine()
        self._try("down", lambda: self._end_machine(machine, shown=True))
        if self._proof is None:
            self._end_machine(machine, shown=False)
        assert self._proof is not None  # without a screen nothing is left that could raise
        return self._proof

    def _end_machine(self, machine: Machine, shown: bool) -> None:
        with self._shown(machine, "down") if shown else contextlib.nullcontext():
            self._close_endpoint()
            self._proof = machine_from_record.end_machine(machine, self._add_trouble)

    def _machine(self) -> Machine:
        assert self._components.machine is not None  # `end` looked
        return self._components.machine

    def _close_endpoint(self) -> None:
        """After this there is no renewal, no request and no token; harmless when repeated."""
        if self._components.monitor is not None:
            self._try("ending the heartbeat", self._components.monitor.stop)
        if self._components.relay is not None:
            self._try("closing the relay", self._components.relay.close_to_programs)
        self._try("forgetting the token", lambda: delete_token(self._folder))

    def _proven_by_another(self) -> Proof | None:
        """The proof of another process that ended the run before us."""
        now = self._try("reading the record", lambda: self._store.load(self._run_id))
        if now is None:
            return None
        if now.launch != self._run.record.launch:  # we stood still, and it was ended and taken up meanwhile
            self._ours = False
            return Proof(True, "another launch has resumed it")
        if now.live or now.proof is None:
            return None
        self._warn(f"{now.ended_by} has already ended it")
        if now.unpulled is not None:
            self._unpulled = NotPulled("the newest results were not copied", now.unpulled, None)
        return Proof(bool(now.proof["verified"]), str(now.proof["detail"]), now.proof.get("hint"))

    # -------------------------------------------------------------- result

    def write_record(self, proof: Proof) -> int:
        """Finish the record, release the guardian, and print the summary. Returns the exit code."""
        failure = self._failure or self._unpulled
        if not proof.verified:
            # The guardian is not released: when this process ends it tries again.
            hint = proof.hint or f"launch down {self._run.label}"
            failure = TeardownUnverified("could not verify that everything is down", proof.detail, hint)
        if failure is None and self._signals.received is not None:
            failure = Interrupted(self._signals.received)
        failpoint("cli.downed")  # not caught, as above
        unwritten = self._write_final_record(failure, proof)
        failure = failure or unwritten
        if self._components.guardian is not None and proof.verified and unwritten is None:
            self._try("letting the guardian go", self._components.guardian.release)
        over_at = clock.boot_seconds()
        if self._components.trackio is not None and proof.verified:  # else it ends with this process
            self._try("writing to Trackio", self._components.trackio.finish)
        code = exit_code_of(failure)
        self._try("showing the summary", lambda: self._print_summary(failure, proof, code, over_at))
        if self._components.relay is not None:
            self._try("showing the end on the page", self._components.relay.show_end)
        return code

    def _write_final_record(self, failure: BaseException | None, proof: Proof) -> LaunchError | None:
        """Write the final record; returns the reason if it could not be written, and then the guardian
        tries."""
        error: Exception | None = None
        for attempt in range(_WRITES if self._ours else 0):
            time.sleep(_PAUSE_SECONDS if attempt else 0)
            try:
                self._store.update(self._run_id, **self._final_fields(failure, proof))
                return None
            except Exception as refused:  # noqa: BLE001 - after any error the run is over
                error = refused
        if error is None:
            return None
        self._add_trouble(f"the record cannot be written: {described(error)}")
        return as_launch_error(error, self._folder / "launch.log")

    def _final_fields(self, failure: BaseException | None, proof: Proof) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "reason": reason_of(failure),
            "why": why_of(failure),
            "exit_code": self._program_code,
            "troubles": tuple(self._troubles),
        }
        if self._proof is None and self._components.machine is not None:
            # Another process ended the run, and the record's rest is its own.
            return fields
        return fields | end_fields(proof, "launch", self._run.record.now(), self._why_unpulled())

    def _print_summary(self, failure: BaseException | None, proof: Proof, code: int, over_at: float) -> None:
        if isinstance(failure, LaunchError):
            self._output.error(failure)
        self._summary(failure, proof, code, over_at).say(self._output)

    def _summary(self, failure: BaseException | None, proof: Proof, code: int, over_at: float) -> Summary:
        limits, monitor = self._run.limits, self._components.monitor
        return Summary(
            run_id=self._run_id,
            name=self._run.record.name,
            seconds=over_at - limits.begun_at,
            cost=limits.cost(over_at) if self._try("asking its price", self._was_rented) else 0.0,
            status=monitor.latest().status if monitor is not None else None,
            results=self._pulled.into if self._pulled is not None else None,
            proof=proof,
            reason=reason_of(failure),
            why=why_of(failure),
            exit_code=code,
            program_exit_code=self._program_code,
            durability=self._try("asking how far it got", self._durability) or DurabilityStatus(),
            cost_before=lives.cost(self._run.record.earlier_lives, time.time()),
            unpulled=self._why_unpulled(),
            unarmed_seconds=self._try("asking when it was armed", self._unarmed_seconds),
            troubles=tuple(self._troubles),
        )

    def _unarmed_seconds(self) -> float | None:
        machine = self._components.machine
        return None if machine is None else machine.unarmed_seconds

    def _was_rented(self) -> bool:
        """Whether a machine came up that costs something."""
        machine = self._components.machine
        return machine is not None and machine.price_per_hour is not None

    def _durability(self) -> DurabilityStatus:
        """The run's durability at its end."""
        if self._components.machine is None:
            return DurabilityStatus()
        committed = self._components.machine.committed()
        if committed is None and self._pulled is not None:  # a rented machine is gone with its results
            committed = self._pulled.step
        return DurabilityStatus(committed, durable.newest_step(self._results))

    # -------------------------------------------------------------- how

    def _try(self, what: str, act: Callable[[], T]) -> T | None:
        """The result of `act`; None if it raises, which is noted as a trouble of this end."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - after any error the next step must be taken
            LOGGER.debug("traceback", exc_info=True)
            self._add_trouble(f"{what} failed: {described(error)}")
            return None

    def _add_trouble(self, line: str) -> None:
        self._troubles.append(line)
        self._warn(line)

    def _warn(self, line: str) -> None:
        """Print a warning. A closed terminal or stream must not stop a teardown."""
        with contextlib.suppress(Exception):
            self._output.warn(line)

    @contextlib.contextmanager
    def _shown(self, machine: Machine, name: str) -> Iterator[Progress]:
        """Run one phase: it is recorded before it begins, shown while it lasts, and its time is remembered;
        an error in these does not stop the phase. Yields a callback that takes its progress."""
        noted = {"state": name, "unpulled": self._why_unpulled()}
        self._try(f"noting {name}", lambda: self._store.update(self._run_id, **noted))
        usual = self._try(f"asking how long {name} takes", lambda: self._timings.usual(machine.kind, name))
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            shown = self._try(f"showing {name}", lambda: stack.enter_context(self._output.phase(name, usual)))
            yield shown or no_progress
        self._timings.add(machine.kind, name, time.monotonic() - begun)

    def _why_unpulled(self) -> str | None:
        """The reason the newest results are not on this computer, in one line."""
        return None if self._unpulled is None else self._unpulled.why or self._unpulled.message

    def _not_pulled(self, error: Exception) -> NotPulled:
        """The failure of a pull that raised this."""
        if isinstance(error, NotPulled):
            return error
        LOGGER.debug("traceback", exc_info=True)
        hint = f"launch pull {self._run.label}"
        return NotPulled("the results could not be copied", described(error), hint)
