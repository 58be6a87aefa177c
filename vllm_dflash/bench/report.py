# SPDX-License-Identifier: Apache-2.0
"""A result as Markdown and as one HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_dflash.bench import charts
from vllm_dflash.bench import page as html
from vllm_dflash.bench.plan_of_run import PLAIN

Row = Mapping[str, Any]
SPEED_HEAD = ("group", "load", "tokens/s", "speedup", "acceptance length", "draft ms", "target ms")
LATENCY_HEAD = ("group", "load", "TTFT P50/P95/P99 ms", "TPOT P50/P95/P99 ms", "inter-token", "end to end")
MEMORY_HEAD = ("group", "peak memory, GiB", "KV tokens")
AGREEMENT_HEAD = ("group", "same answers", "largest logit gap", "first differences at")


def load_name(row: Row) -> str:
    context = f"{row['context']} context, {row['output']} tokens"
    return f"{row['workload']}, {context}, {row['concurrency']} at once, T={row['temperature']:g}"


def shown(value: Mapping[str, float] | None, digits: int = 1) -> str:
    """A median with its spread, "12.3 (11.9 to 12.6)"; "" for none."""
    if not value:
        return ""
    median, low, high = (f"{value[key]:.{digits}f}" for key in ("median", "low", "high"))
    return median if low == high else f"{median} ({low} to {high})"


def speed_rows(result: Row) -> list[tuple[str, ...]]:
    return [
        (
            row["group"],
            load_name(row),
            shown(row["output_tokens_per_second"]),
            f"{row['speedup']:.2f}" if "speedup" in row else "",
            shown(row.get("acceptance_length"), 2),
            shown(row.get("draft_ms"), 2),
            shown(row.get("target_ms"), 2),
        )
        for row in result["summary"]
    ]


def latency_rows(result: Row) -> list[tuple[str, ...]]:
    def quantiles(row: Row, name: str) -> str:
        values = [row.get(f"{name}_p{q}_ms") for q in (50, 95, 99)]
        return " / ".join("" if value is None else f"{value['median']:.1f}" for value in values)

    return [
        (row["group"], load_name(row), *(quantiles(row, name) for name in ("ttft", "tpot", "itl", "e2el")))
        for row in result["summary"]
    ]


def memory_rows(result: Row) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for group in result["groups"]:
        own = [row for row in result["summary"] if row["group"] == group]
        peak = max((row["peak_memory_bytes"]["high"] for row in own if row.get("peak_memory_bytes")), default=0)
        tokens = next((row["kv_tokens"]["median"] for row in own if row.get("kv_tokens")), None)
        rows.append((group, f"{peak / 2**30:.2f}", "" if tokens is None else f"{tokens:.0f}"))
    return rows


def agreement_rows(result: Row) -> list[tuple[str, ...]]:
    return [
        (
            group,
            f"{found['same']} of {found['answers']}",
            "" if found["largest_gap"] is None else f"{found['largest_gap']:.4f}",
            ", ".join(map(str, found["first_difference"])),
        )
        for group, found in result["agreement"].items()
    ]


def break_even_lines(result: Row) -> list[str]:
    """What it takes for speculation to pay, a sentence a group."""
    lines = []
    for group, found in result["break_even"].items():
        points = ", ".join(f"{speedup:.2f} times at {length:.2f}" for length, speedup in found["points"])
        crossed = "it never pays here" if found["length"] is None else f"it pays from {found['length']:.2f} on"
        lines.append(f"{group}, by synthetic acceptance: {points}; {crossed}.")
    for group in result["groups"]:
        lengths = [
            row["break_even_length"]
            for row in result["summary"]
            if row["group"] == group and "break_even_length" in row
        ]
        if lengths:
            ends = " to ".join(dict.fromkeys(f"{length:.2f}" for length in (min(lengths), max(lengths))))
            lines.append(f"{group}, by its own cycle over plain decoding's step: an acceptance length of {ends}.")
    return lines


def fact_pairs(result: Row) -> list[tuple[str, str]]:
    settings = result["settings"]
    names = (
        "target",
        "drafts",
        "date",
        "machine",
        "vllm",
        "package",
        "template",
        "serve_arguments",
        "prompts",
        "repeats",
    )
    pairs = []
    for name in names:
        value = settings.get(name)
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        pairs.append((name.replace("_", " "), text or "none"))
    return pairs


def as_markdown(result: Row) -> str:
    """The result for a README or an issue."""
    parts = ["# vllm-dflash bench", "", *(f"- {name}: {value}" for name, value in fact_pairs(result)), ""]
    sections = (
        ("Speed (medians of the repeats, with the lowest and the highest)", SPEED_HEAD, speed_rows(result)),
        ("Latency", LATENCY_HEAD, latency_rows(result)),
        ("Memory", MEMORY_HEAD, memory_rows(result)),
        ("Agreement with plain decoding, T=0", AGREEMENT_HEAD, agreement_rows(result)),
    )
    for title, head, rows in sections:
        if rows:
            parts += [f"## {title}", "", _markdown_table(head, rows), ""]
    lines = break_even_lines(result)
    if lines:
        parts += ["## Break-even", "", *(f"- {line}" for line in lines), ""]
    if result["failures"]:
        parts += ["## Left out", ""]
        parts += [f"- {group}: {why.splitlines()[0]}" for group, why in result["failures"].items()]
        parts.append("")
    return "\n".join(parts)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def as_html(result: Row) -> str:
    """The page: plots first, then the tables they were drawn from."""
    failures = "".join(
        f"<p><strong>{html.escape(group)}</strong></p><pre>{html.escape(why)}</pre>"
        for group, why in result["failures"].items()
    )
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in break_even_lines(result))
    return html.page(
        f"vllm-dflash bench: {result['settings'].get('target')}",
        [
            ("", html.facts(fact_pairs(result))),
            ("Plots", html.plots(plots(result))),
            ("Speed", html.table(SPEED_HEAD, speed_rows(result))),
            ("Latency", html.table(LATENCY_HEAD, latency_rows(result))),
            ("Memory", html.table(MEMORY_HEAD, memory_rows(result))),
            ("Agreement with plain decoding, T=0", html.table(AGREEMENT_HEAD, agreement_rows(result))),
            ("Break-even", f"<ul>{listed}</ul>" if listed else ""),
            ("Left out", failures),
        ],
    )


def plots(result: Row) -> list[str]:
    """Speed and speedup by concurrency and workload, acceptance by position, break-even, tail times."""
    rows, groups = result["summary"], result["groups"]
    drawn = []
    settings = sorted({(row["context"], row["output"], row["temperature"]) for row in rows}, key=str)
    for context, output, temperature in settings:
        chosen = [r for r in rows if (r["context"], r["output"], r["temperature"]) == (context, output, temperature)]
        where = f"{context} context, {output} tokens, T={temperature:g}"
        speeds = {g: _by_concurrency(chosen, g, lambda r: r["output_tokens_per_second"]["median"]) for g in groups}
        drawn.append(_by_load(f"Output tokens a second, {where}", speeds, "tokens/s", None))
        gains = {g: _by_concurrency(chosen, g, lambda r: r.get("speedup")) for g in groups if g != PLAIN}
        drawn.append(_by_load(f"Times plain decoding, {where}", gains, "times", 1.0))
    least = min((row["concurrency"] for row in rows), default=1)
    for group in groups:
        bars = _by_workload([row for row in rows if row["group"] == group and row["concurrency"] == least])
        if group != PLAIN and len(bars) > 1:
            drawn.append(charts.bar_chart(f"{group}: times plain decoding, {least} at once", bars, "x", at=1.0))
    accepted = {g: _acceptance([r for r in rows if r["group"] == g]) for g in groups}
    drawn.append(charts.line_chart("Share of steps that accept the draft at a position", accepted, "position", "share"))
    synthetic = {group: found["points"] for group, found in result["break_even"].items()}
    drawn.append(
        charts.line_chart("Speedup by acceptance length (synthetic)", synthetic, "tokens a cycle", "times", at=1.0)
    )
    tails = {g: _quantiles([r for r in rows if r["group"] == g], "tpot") for g in groups}
    drawn.append(charts.line_chart("Time per output token by percentile", tails, "percentile", "ms"))
    return drawn


def _by_load(title: str, series: Mapping[str, charts.Points], unit: str, at: float | None) -> str:
    """Lines by concurrency, or bars where only one was measured."""
    if any(len(points) > 1 for points in series.values()):
        return charts.line_chart(title, series, "requests at once", unit, log_x=True, at=at)
    return charts.bar_chart(title, {name: points[0][1] for name, points in series.items() if points}, unit, at=at)


def _by_workload(rows: Sequence[Row]) -> dict[str, float]:
    """Workload -> geometric mean of its speedups."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        if "speedup" in row:
            gains.setdefault(row["workload"], []).append(row["speedup"])
    return {workload: statistics.geometric_mean(values) for workload, values in gains.items()}


def _by_concurrency(
    rows: Sequence[Row], group: str, figure: Callable[[Row], float | None]
) -> list[tuple[float, float]]:
    """(requests at once, geometric mean over the workloads)."""
    found: dict[int, list[float]] = {}
    for row in rows:
        value = figure(row) if row["group"] == group else None
        if value:
            found.setdefault(row["concurrency"], []).append(value)
    return [(concurrency, statistics.geometric_mean(values)) for concurrency, values in sorted(found.items())]


def _acceptance(rows: Sequence[Row]) -> list[tuple[float, float]]:
    lists = [row["acceptance_by_position"] for row in rows if row.get("acceptance_by_position")]
    width = max((len(one) for one in lists), default=0)
    return [(j + 1, statistics.fmean(one[j] for one in lists if j < len(one))) for j in range(width)]


def _quantiles(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    points = []
    for quantile in (50, 95, 99):
        values = [row[f"{name}_p{quantile}_ms"]["median"] for row in rows if row.get(f"{name}_p{quantile}_ms")]
        if values:
            points.append((float(quantile), statistics.median(values)))
    return points
