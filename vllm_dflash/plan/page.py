# SPDX-License-Identifier: Apache-2.0
"""The plan as a page with plots."""

from __future__ import annotations

from typing import Any

from vllm_dflash.bench import charts
from vllm_dflash.bench import page as html


def page(figures: dict[str, Any]) -> str:
    """One HTML document of `table.plan`'s figures."""
    rows = figures["by_drafts"]
    plain, cycle = figures["plain_ms_per_token"], figures["cycle_ms"]
    longest = 1 + figures["drafts"]
    lengths = [1 + (longest - 1) * step / 10 for step in range(11)]
    by_context: dict[str, list[tuple[float, float]]] = {}
    for row in figures["best"]:
        by_context.setdefault(f"context {row['context']}", []).append((row["concurrency"], row["drafts"]))
    drawn = [
        charts.line_chart(
            "Time a token by acceptance length",
            {"with speculation": [(n, cycle / n) for n in lengths], "plain": [(1, plain), (longest, plain)]},
            "tokens a cycle",
            "ms a token",
        ),
        charts.line_chart(
            "Speedup by number of drafts",
            {"speedup": [(row["drafts"], row["speedup"]) for row in rows]},
            "K",
            "times",
            at=1.0,
        ),
        charts.line_chart("Best K by concurrency", by_context, "running requests", "K", log_x=True),
    ]
    summary = [
        ("source", figures["source"]),
        ("plain decoding", f"{plain:.2f} ms a token"),
        ("a cycle", f"{cycle:.2f} ms, of which the drafter {figures['draft_ms']:.2f} ms"),
        (
            "with speculation",
            f"{figures['ms_per_token']:.2f} ms a token, {figures['speedup']:.2f} times plain decoding",
        ),
        ("break-even", f"{figures['break_even_length']:.2f} tokens a cycle"),
    ]
    best = [
        (row["concurrency"], row["context"], row["drafts"], f"{row['speedup']:.2f}", f"{row['ms_per_token']:.2f}")
        for row in figures["best"]
    ]
    return html.page(
        "What speculation costs and gains",
        [
            ("", html.facts(summary)),
            ("Plots", html.plots(drawn)),
            ("Best K", html.table(["requests", "context", "K", "speedup", "ms a token"], best)),
        ],
    )
