# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG text: drawn here, so that a page with them needs no script, no font and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 44
# Told apart by people who see few colours too, and by dash and mark.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
DASHES = ("", "6 3", "2 3", "8 3 2 3")

Points = Sequence[tuple[float, float]]


def line_chart(
    title: str,
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    at: float | None = None,
) -> str:
    """A <figure> with one line a series and a legend; `at` draws a level line across. Empty series are left out."""
    drawn = {name: sorted(points) for name, points in series.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points] + ([at] if at is not None else [])
    x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log_x and min(xs) > 0)
    y_axis = _Axis(0.0, max(ys) * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)
    x_ticks = sorted(set(xs)) if len(set(xs)) <= 9 else x_axis.ticks()
    parts = [_frame(x_axis, y_axis, x_ticks, x_label, y_label)]
    if at is not None:
        y = y_axis.place(at)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for number, (name, points) in enumerate(drawn.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        placed = [(x_axis.place(x), y_axis.place(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>')
        for (x, y), (value_x, value_y) in zip(placed, points, strict=True):
            label = f"{name}: {value_y:.4g} at {value_x:g}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{escape(label)}</title></circle>'
            )
    return _figure(title, "".join(parts), list(drawn))


def bar_chart(title: str, values: Mapping[str, float], unit: str, at: float | None = None) -> str:
    """A <figure> of horizontal bars with their values; `at` draws a level line."""
    if not values:
        return ""
    row = 30
    height = row * len(values) + 10
    label_width = min(170, max(len(name) for name in values) * 7 + 10)
    most = max([*values.values(), at or 0.0]) or 1.0
    scale = (WIDTH - label_width - 70) / most
    parts = []
    for number, (name, value) in enumerate(values.items()):
        y, width = number * row + 8, max(1.0, value * scale)
        parts.append(
            f'<text x="{label_width - 6}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{label_width}" y="{y}" width="{width:.1f}" height="20" fill="{COLOURS[number % len(COLOURS)]}"/>'
            f'<text x="{label_width + width + 5:.1f}" y="{y + 15}">{value:.3g} {escape(unit)}</text>'
        )
    if at is not None:
        x = label_width + at * scale
        parts.append(f'<line class="level" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    return _figure(title, "".join(parts), [], height)


class _Axis:
    """Values to pixels between `start` and `end`, linear or by powers of two."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About five round numbers from low to high."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def _frame(x_axis: _Axis, y_axis: _Axis, x_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
        )
    for tick in x_ticks:
        x = x_axis.place(tick)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_short(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 12 {centre})"'
    parts.append(f'<text x="12" y="{centre}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return "".join(parts)


def _figure(title: str, body: str, legend: Sequence[str], height: int = HEIGHT) -> str:
    keys = "".join(
        f'<span><svg width="26" height="10" aria-hidden="true"><line x1="1" x2="25" y1="5" y2="5" '
        f'stroke="{COLOURS[n % len(COLOURS)]}" stroke-width="2.5" stroke-dasharray="{DASHES[n % len(DASHES)]}"/></svg>'
        f"{escape(name)}</span>"
        for n, name in enumerate(legend)
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{body}</svg>'
        + (f'<div class="legend">{keys}</div>' if keys else "")
        + "</figure>"
    )


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 10000 else f"{value:.6g}"
