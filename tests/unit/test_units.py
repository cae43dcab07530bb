"""launcher/base/units.py: durations and money as people write them."""

from __future__ import annotations

import pytest

from launcher.base.units import format_duration, parse_duration, parse_money


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("4h", 14400), ("1h30m", 5400), ("2d", 172800), ("1.5 H", 5400)],
)
def test_durations_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "15", "4x", "-4h", "h", "4h2", "0s", "four hours"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "dollars"), [("40", 40), ("$40", 40), ("12.50", 12.5), ("40 USD", 40)])
def test_money_is_read_in_dollars(text: str, dollars: float) -> None:
    assert parse_money(text) == dollars


@pytest.mark.parametrize("text", ["", "free", "-3", "0", "1.234", "€5"])
def test_what_is_not_money_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="amount"):
        parse_money(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4 s"),
        (0.97, "1 s"),
        (8.4, "8 s"),
        (59.6, "1m"),
        (192, "3m 12s"),
        (3900, "1h 05m"),
        (187200, "2d 04h"),
        (-1, "0.0 s"),
        (float("inf"), "-"),
    ],
)
def test_durations_are_shown_in_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
