"""launcher/run/signals.py: the first signal, the second one, and those that were not for us."""

from __future__ import annotations

import os
import signal
import time

import pytest

from launcher.run.signals import Interrupted, Signals


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_is_said_and_raised_where_it_may_be() -> None:
    said: list[str] = []
    with Signals(said.append) as signals:
        signals.consequence = "all ends well"
        with pytest.raises(Interrupted) as caught, signals.raising():
            send(signal.SIGTERM)
        assert caught.value.exit_code == 143
    assert said == ["TERM: all ends well"]


def test_elsewhere_it_is_only_noted_and_raised_at_the_next_place() -> None:
    with Signals(lambda text: None) as signals:
        send(signal.SIGHUP)
        assert signals.received == signal.SIGHUP
        with pytest.raises(Interrupted), signals.raising():
            pytest.fail("not reached")


def test_the_second_signal_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    left: list[int] = []
    with Signals(said.append, left.append) as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert left == [], "one Ctrl-C that came twice, from the terminal and from a wrapper"
        later = time.monotonic() + 1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        send(signal.SIGINT)
        assert signals.received == signal.SIGINT
    assert left == [130]
    assert "guardian" in said[-1]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP], ids=str)
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_g22_only_a_ctrl_c_after_the_first_signal_leaves(
    first: signal.Signals, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that is closed after Ctrl-C, and `launch down` beside it, ask for the end as well."""
    said: list[str] = []
    left: list[int] = []
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Signals(said.append, left.append) as signals:
        signals.consequence = "all ends well"
        for number in (first, second, second):
            send(number)
            now[0] += 1.0
        assert signals.received == first
        assert left == [] and all("all ends well" in line for line in said), said
        send(signal.SIGINT)
    assert left == [130]


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(lambda text: None) as signals:
            send(signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_before_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Signals(lambda text: None):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.slow
def test_an_alarm_rings_only_where_it_may_be_raised_and_is_no_signal_of_the_users() -> None:
    with Signals(lambda text: pytest.fail(text)) as signals:
        signals.alarm(0.02)
        time.sleep(0.1)
        signals.alarm(1.0)
        with pytest.raises(Interrupted) as caught, signals.raising():
            time.sleep(60)
        assert caught.value.number == signal.SIGALRM
        assert signals.received is None
        signals.alarm(0.2)
        signals.alarm(None)
        with signals.raising():
            time.sleep(0.3)
