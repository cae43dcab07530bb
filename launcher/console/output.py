"""The only place that prints: for people (a live line on a terminal, else plain lines) or as JSON.

stdout is the result, stderr everything else. With `--json` stdout has one object a line, each with "schema".
Text from machines and models passes the terminal filter (`base/sanitize.py`).
Neighbours: `run.py` and the verbs report here; `terminal.py` draws the live line; `log.py` keeps a copy of
everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from launcher.base import layout, sanitize
from launcher.base.errors import JobFailed, LaunchError, NotStarted
from launcher.base.log import LOGGER, REDACTOR, log_path
from launcher.base.units import format_duration, format_money
from launcher.console.terminal import StatusLine

SCHEMA = 1
_RED, _YELLOW, _DIM, _BOLD, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_REDRAW_SECONDS = 0.5
# Without a terminal a long phase prints a line once in a while, and a run prints its state.
QUIET_SECONDS = 20.0
# Phases whose key in records and JSON is an older word.
_PHASE_NAMES = {"arm": "provision"}


class CompleteHint(Protocol):
    """Puts the rest of the typed line into a hint, without some of its settings (`cli/typed_line.py`)."""

    def __call__(self, hint: str, without: Sequence[str] = (), /) -> str: ...


def _unchanged(hint: str, without: Sequence[str] = (), /) -> str:
    return hint


@dataclass(frozen=True)
class LiveStatus:
    """The content of the live line of a run; None for a value not known yet."""

    name: str
    up_seconds: float
    cost: float
    budget: float | None = None
    step: int | None = None
    # The number of its program's last step, and the time until then, where both are known.
    steps: int | None = None
    seconds_left: float | None = None
    reward: float | None = None
    tunnel_ms: float | None = None
    lease_left_seconds: float | None = None
    trouble: str | None = None
    # The prompt that a person should answer; the line shows nothing else meanwhile.
    waits_for: str | None = None

    def line(self) -> str:
        """name · up time · $ of budget · step of steps, time left · reward · tunnel ms · lease left."""
        money = format_money(self.cost) + (f" of {format_money(self.budget)}" if self.budget else "")
        parts = [self.name, f"up {format_duration(self.up_seconds)}", money]
        if self.waits_for and not self.trouble:
            return " · ".join([*parts, self.waits_for])
        parts.append(self._step())
        parts.append("reward -" if self.reward is None else f"reward {self.reward:.3g}")
        parts.append("tunnel -" if self.tunnel_ms is None else f"tunnel {self.tunnel_ms:.0f} ms")
        left = self.lease_left_seconds
        # Renewed all the time, so its seconds matter only when it is nearly over.
        parts.append("lease -" if left is None else f"lease {_rounded_duration(left)} left")
        if self.trouble:
            parts.append(self.trouble)
        return " · ".join(parts)

    def _step(self) -> str:
        if self.step is None:
            return "step -"
        if self.steps is None or self.step > self.steps:  # the program has gone on to something else
            return f"step {self.step}"
        is_known = self.seconds_left is not None and self.seconds_left >= 1
        left = f", about {_rounded_duration(self.seconds_left or 0.0)} left" if is_known else ""
        return f"step {self.step} of {self.steps}{left}"


def _rounded_duration(seconds: float) -> str:
    """In whole minutes, from two on."""
    return format_duration(seconds if seconds < 120 else seconds // 60 * 60)


class Output:
    """Prints in one of three ways. `as_json` wins over `plain`; a terminal gets the live line.

    `complete_hint` is applied to each error's hint."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        plain: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
        complete_hint: CompleteHint = _unchanged,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.as_json = as_json
        self.complete_hint = complete_hint
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        terminal = self._stderr.isatty() and environ.get("TERM") != "dumb"
        self._colour = not environ.get("NO_COLOR") and (bool(environ.get("FORCE_COLOR")) or terminal)
        self._line = StatusLine(self._stderr) if terminal and not plain and not as_json else None
        if self._line:
            self._line.draw("")  # over main.py's first words
        self._last_status: tuple[float, int | None, str | None] | None = None

    # -------------------------------------------------------------- verbs

    @property
    def width(self) -> int | None:
        """The width of stdout, if that is a terminal."""
        return layout.terminal_width(self._stdout)

    def result(self, data: Mapping[str, Any], text: str, *, verbatim: bool = False) -> None:
        """The answer of a verb: `data` as one object, or `text`. `verbatim`: its lines are a shell's."""
        if self.as_json:
            self._print_json(data)
        elif text:
            shown = sanitize.plain_text(text)
            self._print(self._stdout, shown if verbatim else layout.fit(shown, self.width))

    def note(self, text: str) -> None:
        """A line on stderr beside the answer of a verb."""
        LOGGER.info("%s", text)
        self._print_line(text)

    @contextlib.contextmanager
    def stream_log(self) -> Iterator[Callable[[str], None]]:
        """A log, to stdout; yields the function that takes its pieces."""
        shown = sanitize.LogStream()

        def write(text: str) -> None:
            with contextlib.suppress(OSError):
                self._stdout.write(text)
                self._stdout.flush()

        try:
            yield lambda piece: write(shown.feed(piece))
        finally:
            write(shown.end())

    def error(self, error: LaunchError, **fields: Any) -> None:
        """The failure, its reason and a hint, and the log's path if there is one. Above them, the last
        output of the failed process, if nobody has seen it."""
        path = log_path()
        LOGGER.error("%s: %s (%s)", type(error).__name__, error.message, error.why)
        hint = self.complete_hint(error.hint, error.without) if error.hint else None
        if self.as_json:
            self._print_json(
                {
                    "event": "error",
                    "error": error.to_dict() | {"hint": hint},
                    "log": str(path) if path else None,
                    **fields,
                }
            )
        self.release_terminal()
        last = error.last_lines if isinstance(error, JobFailed | NotStarted) else []
        for line in last:
            LOGGER.info("| %s", line)
        lines = [self._styled(_DIM, f"  | {sanitize.one_line(line)}") for line in last]
        message = self._fit(f"Error: {sanitize.one_line(error.message)}")
        lines.append(self._styled(_RED + _BOLD, message))
        lines += [self._fit(f"  {sanitize.plain_text(line)}") for line in (error.why or "").splitlines()]
        if hint:
            lines.append(self._fit(f"Hint: {sanitize.one_line(hint)}"))
        if path:
            lines.append(self._styled(_DIM, f"Log: {path}"))
        self._print(self._stderr, REDACTOR.redact("\n".join(lines)))

    def traceback(self, *, show: bool) -> None:
        """The exception being handled: always in the log, on stderr if requested."""
        LOGGER.debug("traceback", exc_info=True)
        if show:
            import traceback

            self._print(self._stderr, sanitize.plain_text(REDACTOR.redact(traceback.format_exc())))

    # -------------------------------------------------------------- a run

    def event(self, event: str, line: str | None = None, /, **fields: Any) -> None:
        """An event: an object for `--json`, a line for people if there is one."""
        LOGGER.info("%s", line or f"{event} {fields}")
        if self.as_json:
            self._print_json({"event": event, **fields})
        elif line is not None:
            self._print_line(line)

    def warn(self, text: str) -> None:
        """A warning; the run goes on."""
        LOGGER.warning("%s", text)
        if self.as_json:
            self._print_json({"event": "warning", "text": text})
        else:
            self._print_line(text, _YELLOW)

    @contextlib.contextmanager
    def phase(self, name: str, usual_seconds: float | None = None) -> Iterator[Callable[[str], None]]:
        """One timed phase of a run; yields the function that takes its progress, one line at a time."""
        begun = time.monotonic()
        LOGGER.info("%s begins", name)
        if self.as_json:
            self._print_json(
                {"event": "phase", "phase": name, "state": "begin", "usual_seconds": usual_seconds}
            )
        known = usual_seconds is not None and usual_seconds >= 1
        usual = f" (usually {format_duration(usual_seconds or 0)})" if known else ""
        detail = ""

        def text() -> str:
            shown = f"  {phase_name(name):<9} {format_duration(time.monotonic() - begun)}{usual}"
            return f"{shown} · {detail}" if detail else shown

        def progress(line: str) -> None:
            nonlocal detail
            LOGGER.info("%s: %s", name, line)
            detail = line
            self._draw(text())

        state = "broken off"
        try:
            with self._redrawing(text, lambda: self._print_waiting(name, time.monotonic() - begun, detail)):
                yield progress
            state = "end"
        finally:
            seconds = time.monotonic() - begun
            LOGGER.info("%s %s after %.2f s", name, state, seconds)
            if self.as_json:
                self._print_json(
                    {"event": "phase", "phase": name, "state": state, "seconds": round(seconds, 3)}
                )
            else:
                how = usual if state == "end" else ", interrupted"
                self._print_line(f"  {phase_name(name):<9} {format_duration(seconds)}{how}")

    @contextlib.contextmanager
    def busy(self, what: str, detail: str = "") -> Iterator[Callable[[str], None]]:
        """Show that a verb is doing something that may take long: a live line; without a terminal, a line on
        stderr each QUIET_SECONDS. Yields a callback that takes its progress; stdout has the answer alone."""
        begun = time.monotonic()

        def text() -> str:
            shown = f"{what}, {format_duration(time.monotonic() - begun)}"
            return f"{shown} · {detail}" if detail else shown

        def progress(line: str) -> None:
            nonlocal detail
            detail = line

        with self._redrawing(text, lambda: self.note(text())):
            yield progress

    @contextlib.contextmanager
    def shared_terminal(self, shared: bool) -> Iterator[None]:
        """While a program may write to our terminal, the live line stands apart on its last row."""
        if self._line and shared:
            self._line.pin()
        try:
            yield
        finally:
            self.release_terminal()

    def update_status(self, status: LiveStatus) -> None:
        """The run's current status. Without a terminal: printed at a new step or problem, else now and
        then."""
        if self._line:
            self._draw(status.line(), _YELLOW if status.trouble else _DIM)
            return
        now = time.monotonic()
        if self._last_status is not None:
            then, step, trouble = self._last_status
            if now - then < QUIET_SECONDS and (step, trouble) == (status.step, status.trouble):
                return
        self._last_status = (now, status.step, status.trouble)
        self.event("status", status.line(), **asdict(status))

    def release_terminal(self) -> None:
        """Remove the live line."""
        if self._line:
            self._line.clear()

    def write_from_signal_handler(self, text: str) -> None:
        """A line from a signal handler: it waits for no lock and goes round the stream's own buffer."""
        sequence = self._line.clear_sequence() if self._line else ""
        with contextlib.suppress(OSError, ValueError):
            os.write(self._stderr.fileno(), f"{sequence}{text}\n".encode(errors="replace"))

    def claim_stdout(self) -> None:
        """With `--json`, keep stdout for our objects: the output of a program or a library goes to stderr."""
        if self.as_json and self._stdout is sys.stdout:
            sys.stdout.flush()
            self._stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
            os.dup2(2, 1)

    # -------------------------------------------------------------- how

    @contextlib.contextmanager
    def _redrawing(self, text: Callable[[], str], waiting: Callable[[], None]) -> Iterator[None]:
        """Redraw while the main thread is busy; without a terminal, a line or object each QUIET_SECONDS."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(_REDRAW_SECONDS if self._line else QUIET_SECONDS):
                if self._line:
                    self._draw(text())
                elif self.as_json:
                    waiting()
                else:
                    self._print_line(text())

        ticker = threading.Thread(target=tick, name="ticker", daemon=True)
        self._draw(text())
        ticker.start()
        try:
            yield
        finally:
            over.set()
            ticker.join(1.0)
            self.release_terminal()

    def _print_waiting(self, phase: str, seconds: float, detail: str) -> None:
        fields = {"state": "waiting", "seconds": round(seconds, 3), "detail": detail or None}
        self._print_json({"event": "phase", "phase": phase, **fields})

    def _draw(self, text: str, style: str = _DIM) -> None:
        if self._line:
            self._line.draw(sanitize.one_line(text), self._style(style))

    def _print_line(self, text: str, style: str = "") -> None:
        line = self._styled(style, self._fit(sanitize.plain_text(REDACTOR.redact(text))))
        if self._line:
            self._line.write(line)
        else:
            self._print(self._stderr, line)

    def _print_json(self, data: Mapping[str, Any]) -> None:
        text = json.dumps({"schema": SCHEMA, **data}, default=str, ensure_ascii=False)
        self._print(self._stdout, sanitize.json_text(REDACTOR.redact(text)))

    def _print(self, stream: TextIO, text: str) -> None:
        # A reader or a terminal that went away is no reason to leave a run half-way.
        with contextlib.suppress(OSError):
            stream.write(text + "\n")
            stream.flush()

    def _fit(self, text: str) -> str:
        return layout.fit(text, layout.terminal_width(self._stderr))

    def _style(self, sequence: str) -> str:
        return sequence if self._colour else ""

    def _styled(self, sequence: str, text: str) -> str:
        return f"{sequence}{text}{_PLAIN}" if sequence and self._colour else text


def phase_name(key: str) -> str:
    """The phase of a run as people see it, by its key in a record."""
    return _PHASE_NAMES.get(key, key)
