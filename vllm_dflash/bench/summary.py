# SPDX-License-Identifier: Apache-2.0
"""From cells to a result: medians and spreads over the repeats, speedups, break-even, agreement."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_dflash.bench import agreement
from vllm_dflash.bench.plan_of_run import PLAIN

POINT = ("workload", "context", "output", "temperature", "concurrency")
LISTS = ("acceptance_by_position",)


def summarise(
    cells: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], failures: Mapping[str, str]
) -> dict[str, Any]:
    """The whole result as plain data. cells: the lines of cells.jsonl."""
    loads: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    synthetic: dict[str, Mapping[str, Any]] = {}
    for entry in cells:
        cell = entry["cell"]
        if cell["kind"] == "agreement":
            answers[cell["group"]] = entry["figures"]["answers"]
        elif cell["kind"] == "break_even":
            synthetic[cell["group"]] = entry["figures"]
        else:
            point = (cell["group"], cell["workload"], cell["context"][0], cell["output"], cell["temperature"])
            loads.setdefault((*point, cell["concurrency"]), []).append(entry["figures"])
    summary = [_row(point, figures) for point, figures in loads.items()]
    plain = {_point(row): row for row in summary if row["group"] == PLAIN}
    for row in summary:
        base = plain.get(_point(row))
        if base is None:
            continue
        row["speedup"] = row["output_tokens_per_second"]["median"] / base["output_tokens_per_second"]["median"]
        if row.get("acceptance_length") and row["tpot_p50_ms"] and base["tpot_p50_ms"]:
            cycle = row["tpot_p50_ms"]["median"] * row["acceptance_length"]["median"]
            row["cycle_ms"], row["break_even_length"] = cycle, cycle / base["tpot_p50_ms"]["median"]
    compared = {group: agreement.compare(answers[PLAIN], made) for group, made in answers.items() if group != PLAIN}
    return {
        "settings": dict(settings),
        "groups": list(dict.fromkeys(row["group"] for row in summary)),
        "summary": summary,
        "agreement": compared if PLAIN in answers else {},
        "break_even": _break_even(synthetic, summary),
        "failures": dict(failures),
    }


def _point(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in POINT)


def _row(point: tuple[Any, ...], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(("group", *POINT), point, strict=True))
    row["repeats"] = len(figures)
    for name in dict.fromkeys(key for one in figures for key in one):
        values = [one[name] for one in figures if one.get(name) is not None]
        if name in LISTS:
            width = max(len(value) for value in values)
            row[name] = [statistics.fmean(v[j] if j < len(v) else 0.0 for v in values) for j in range(width)]
        else:
            row[name] = spread(values)
    return row


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """{"median", "low", "high"} of some repeats, None without any."""
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _break_even(synthetic: Mapping[str, Mapping[str, Any]], summary: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Group -> measured speedups at set acceptance lengths, and the length at which the line through them is 1.

    The first load's plain decoding is what they are held against. Tokens a second grow with the length at a fixed
    cycle, so between two lengths the speedup is a straight line.
    """
    base = next((row for row in summary if row["group"] == PLAIN), None)
    if base is None:
        return {}
    plain = base["output_tokens_per_second"]["median"]
    points: dict[str, list[tuple[float, float]]] = {}
    for name, figures in synthetic.items():
        group = name.partition("@")[0]
        points.setdefault(group, []).append((figures["acceptance_length"], figures["output_tokens_per_second"] / plain))
    return {group: {"points": sorted(several), "length": crossing(several)} for group, several in points.items()}


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The length at which the line through the outermost (length, speedup) reaches 1; None if it never does."""
    (low, slow), (high, fast) = min(points), max(points)
    if high == low or fast <= slow:
        return None
    return low + (1.0 - slow) * (high - low) / (fast - slow)
