"""Charts as SVG: lines over steps with error bars, and groups of bars.

Neighbour: `results/report_page.py` chooses the charts. No library and no font of its own: the file is small,
and opens in any browser without a network. Knows nothing of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 760, 300
# Told apart by most eyes, on white and in print (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 58, 44
_TICKS = 5
# As wide as a letter may be.
_CHARACTER_WIDTH = 7
_MAX_NAME_LENGTH = 21
# Of a bar's height, for the number above it.
_LABEL_ROOM = 0.12

Kind = Literal["line", "faint", "marks"]


@dataclass(frozen=True)
class Point:
    """One value; `error` is one standard error of it."""

    x: float
    y: float
    error: float | None = None


@dataclass(frozen=True)
class ChartLine:
    """`faint`: a line whose mean another line shows. `marks`: each point is drawn, with its error."""

    name: str
    points: Sequence[Point]
    kind: Kind = "line"
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over one axis. `low`, `high`: the vertical axis covers at least these values."""

    title: str
    lines: Sequence[ChartLine]
    x_name: str = "step"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bars:
    """Groups of bars: each group's name, and its bars by theirs."""

    title: str
    groups: Sequence[tuple[str, dict[str, Point]]]


def page(charts: Sequence[Chart | Bars], title: str, notes: Sequence[str] = ()) -> str:
    """All of them below one another, as one SVG file."""
    head = 40 + 18 * len(notes)
    height = head + HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-size="17" font-weight="600">{escape(title)}</text>',
        *(
            f'<text x="{_LEFT}" y="{46 + 18 * at}" fill="#555">{escape(note)}</text>'
            for at, note in enumerate(notes)
        ),
    ]
    for at, one in enumerate(charts):
        drawn = _bars(one) if isinstance(one, Bars) else _chart(one)
        parts += [f'<g transform="translate(0 {head + at * HEIGHT})">', *drawn, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, most: int = _TICKS) -> list[float]:
    """Round numbers that take in `low` and `high`: both ends are among them."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    width = next(size * it for it in (1, 2, 2.5, 5, 10) if size * it >= rough * (1 - 1e-9))
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [width * it for it in range(first, last + 1)]


def as_text(value: float) -> str:
    """A number as an axis has it."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}"
    return f"{value:.4f}".rstrip("0").rstrip(".") or "0"


# ------------------------------------------------------------------ how


@dataclass(frozen=True)
class _Axis:
    """Where a value lies between two places of the picture."""

    values: Sequence[float]
    begin: float
    end: float

    def at(self, value: float) -> float:
        low, high = self.values[0], self.values[-1]
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def _frame(title: str, y: _Axis) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="20" font-size="14" font-weight="600">{escape(title)}</text>']
    for value in y.values:
        place = y.at(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}" stroke="#e4e4e4"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 8}" y="{place + 4:.1f}" text-anchor="end" fill="#555">{as_text(value)}</text>'
        )
    return parts


def _legend(names: Iterable[tuple[str, str]]) -> list[str]:
    """Names with their colours, beside one another."""
    parts, x = [], _LEFT
    for name, colour in names:
        label = _short(name)
        if x + _CHARACTER_WIDTH * len(label) > WIDTH - _RIGHT:
            break
        parts.append(f'<rect x="{x}" y="33" width="10" height="10" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="42" fill="#555">{escape(label)}</text>')
        x += 35 + _CHARACTER_WIDTH * len(label)
    return parts


def _short(name: str, most: int = _MAX_NAME_LENGTH) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _chart(chart: Chart) -> list[str]:
    points = [point for line in chart.lines for point in line.points]
    ends = [end for it in points for end in (it.y - (it.error or 0), it.y + (it.error or 0))]
    ends += [it for it in (chart.low, chart.high) if it is not None]
    y = _Axis(ticks(min(ends), max(ends)), HEIGHT - _BOTTOM, _TOP)
    xs = [it.x for it in points]
    whole = [it for it in ticks(min(xs), max(xs), 8) if it == int(it)]
    x = _Axis(whole if len(whole) > 1 else ticks(min(xs), max(xs), 8), _LEFT, WIDTH - _RIGHT - 12)
    parts = _frame(chart.title, y)
    for value in x.values:
        place = f'x="{x.at(value):.1f}" y="{HEIGHT - _BOTTOM + 18}"'
        parts.append(f'<text {place} text-anchor="middle" fill="#555">{as_text(value)}</text>')
    parts.append(
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 8}" text-anchor="end" fill="#555">'
        f"{escape(chart.x_name)}</text>"
    )
    for line in chart.lines:
        parts += _series(line, x, y)
    named = [(line.name, _colour(line.colour)) for line in chart.lines if line.kind != "faint"]
    return parts + _legend(named)


def _series(line: ChartLine, x: _Axis, y: _Axis) -> list[str]:
    colour = _colour(line.colour)
    placed = [(x.at(it.x), y.at(it.y), it) for it in line.points]
    width, opacity = (1, 0.4) if line.kind == "faint" else (2, 1)
    path = " ".join(f"{across:.1f},{up:.1f}" for across, up, _ in placed)
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-linejoin="round"/>'
    ]
    for across, up, point in placed if line.kind == "marks" else []:
        parts += _error_bar(across, point, y, colour)
        parts.append(
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(line.name)}, {_tooltip(point)}</title></circle>"
        )
    return parts


def _bars(bars: Bars) -> list[str]:
    points = [point for _, group in bars.groups for point in group.values()]
    ends = [0.0, *(end for it in points for end in (it.y - (it.error or 0), it.y + (it.error or 0)))]
    above = (max(ends) - min(ends)) * _LABEL_ROOM
    y = _Axis(ticks(min(ends), max(ends) + above), HEIGHT - _BOTTOM, _TOP)
    names = list(dict.fromkeys(name for _, group in bars.groups for name in group))
    parts = _frame(bars.title, y)
    room = (WIDTH - _RIGHT - _LEFT) / len(bars.groups)
    width = min(60.0, room * 0.8 / len(names))
    for at, (label, group) in enumerate(bars.groups):
        begin = _LEFT + room * at + (room - width * len(names)) / 2
        for place, name in enumerate(names):
            if name in group:
                parts += _bar(group[name], name, begin + place * width, width, y, _colour(place))
        parts.append(
            f'<text x="{_LEFT + room * (at + 0.5):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{escape(_short(label, max(6, int(room / 7))))}</text>"
        )
    return parts + _legend((name, _colour(place)) for place, name in enumerate(names))


def _bar(point: Point, name: str, left: float, width: float, y: _Axis, colour: str) -> list[str]:
    up, ground = y.at(point.y), y.at(0.0)
    middle = left + width / 2
    top = y.at(point.y + (point.error or 0)) if point.y >= 0 else ground
    return [
        f'<rect x="{left + 2:.1f}" y="{min(up, ground):.1f}" width="{width - 4:.1f}" '
        f'height="{abs(ground - up):.1f}" fill="{colour}" fill-opacity="0.85">'
        f"<title>{escape(name)}: {_value(point)}</title></rect>",
        *_error_bar(middle, point, y, "#222"),
        f'<text x="{middle:.1f}" y="{min(top, up) - 5:.1f}" text-anchor="middle" font-size="11">'
        f"{point.y:.3g}</text>",
    ]


def _error_bar(across: float, point: Point, y: _Axis, colour: str) -> list[str]:
    if not point.error:
        return []
    low, high = y.at(point.y - point.error), y.at(point.y + point.error)
    return [
        f'<path d="M{across:.1f} {low:.1f}V{high:.1f}M{across - 4:.1f} {low:.1f}h8M{across - 4:.1f} '
        f'{high:.1f}h8" stroke="{colour}" fill="none"/>'
    ]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _tooltip(point: Point) -> str:
    return f"step {as_text(point.x)}: {_value(point)}"


def _value(point: Point) -> str:
    return f"{point.y:.4g}" + (f" ±{point.error:.2g}" if point.error is not None else "")
