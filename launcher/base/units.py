"""Durations, money and rates as people write and read them.

Neighbours: `setting_sources.py` parses with these, `output.py` shows with these.
Knows nothing of a value's source. Errors are ValueErrors whose text is the reason.
"""

from __future__ import annotations

import math
import re

_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.ASCII)
_MAX_SECONDS = 366 * 86400.0
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])b(?:/s)?", re.IGNORECASE | re.ASCII)
_POWERS = {"k": 1e3, "m": 1e6, "g": 1e9}
# Slower than this nothing of a run comes home in time.
_MIN_BYTES_PER_SECOND = 100e3
_MONEY = re.compile(r"\$?\s*(-?\d+(?:\.\d{1,2})?)\s*(?:\$|usd)?", re.IGNORECASE | re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds in "90s", "15m", "4h", "1h30m", "2d". A bare number is refused, because its unit is unknown."""
    compact = text.strip().lower().replace(" ", "")
    parts = _PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise ValueError("a duration is a number with a unit: 90s, 15m, 4h, 1h30m, 2d")
    seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    if seconds <= 0:
        raise ValueError("a duration must be longer than zero")
    if seconds > _MAX_SECONDS:
        raise ValueError("a duration can be at most a year")
    return seconds


def parse_money(text: str) -> float:
    """US dollars in "40", "$40", "12.50"."""
    match = _MONEY.fullmatch(text.strip())
    if match is None:
        raise ValueError("an amount is a number of US dollars: 40, $40, 12.50")
    amount = float(match.group(1))
    if amount <= 0:
        raise ValueError("an amount must be more than zero")
    return amount


def parse_rate(text: str) -> float:
    """Bytes a second in "2MB/s", "500 kB/s", "1.5MB"."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a rate is a number of bytes per second with a unit: 500kB/s, 2MB/s; or none")
    rate = float(match.group(1)) * _POWERS[match.group(2).lower()]
    if rate < _MIN_BYTES_PER_SECOND:
        raise ValueError(f"the minimum is {format_rate(_MIN_BYTES_PER_SECOND)}")
    return rate


def format_rate(bytes_per_second: float) -> str:
    """ "2.4 MB/s", "500 kB/s"; "none" for no bound."""
    if math.isinf(bytes_per_second):
        return "none"
    if bytes_per_second < 1e6:
        return f"{bytes_per_second / 1e3:.0f} kB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def format_duration(seconds: float) -> str:
    """Two units at most: "0.4 s", "8 s", "15m", "3m 12s", "1h 05m", "2d 04h"."""
    if not math.isfinite(seconds):
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _two_units(whole, 60, "m", 1, "s")
    if whole < 86400:
        return _two_units(whole, 3600, "h", 60, "m")
    return _two_units(whole, 86400, "d", 3600, "h")


def duration_word(seconds: float) -> str:
    """One word that `parse_duration` reads as just this: "2h", "1h30m", "5431s"."""
    short = format_duration(seconds).replace(" ", "")
    return short if parse_duration(short) == seconds else f"{seconds:.0f}s"


def _two_units(whole: int, large: int, large_unit: str, small: int, small_unit: str) -> str:
    rest = whole % large // small
    return f"{whole // large}{large_unit}" + (f" {rest:02d}{small_unit}" if rest else "")


def format_money(dollars: float) -> str:
    return f"${dollars:,.2f}"


def money_word(dollars: float) -> str:
    """One word that `parse_money` reads and no shell changes: "40", "12.50"."""
    return f"{dollars:.2f}".removesuffix(".00")
