# SPDX-License-Identifier: Apache-2.0
"""The plan itself: speedup by number of drafts, the best of them by concurrency and context, the break-even."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_dflash.plan.inputs import Inputs
from vllm_dflash.spec_decode.cost import expected_tokens

BAR = 36


def plan(inputs: Inputs, concurrencies: Sequence[int], contexts: Sequence[int]) -> dict[str, Any]:
    """All figures as plain data; times in ms. Keys are stable.

    "best" holds, for each concurrency and context, the K with the least time a token (0: plain decoding).
    """
    cost, acceptance, k = inputs.cost, inputs.acceptance, inputs.drafts
    requests, context = concurrencies[0], contexts[0]
    plain = cost.seconds(0, requests, context)
    length = expected_tokens(acceptance, k)
    cycle = cost.seconds(k, requests, context)
    return {
        "source": inputs.source,
        "drafts": k,
        "acceptance": list(acceptance),
        "acceptance_length": length,
        "plain_ms_per_token": plain * 1e3,
        "draft_ms": cost.draft_seconds(k, requests, context) * 1e3,
        "cycle_ms": cycle * 1e3,
        "ms_per_token": cycle / length * 1e3,
        "speedup": plain * length / cycle,
        "break_even_length": cost.break_even_length(k, requests, context),
        "flat": inputs.flat,
        "by_drafts": [_row(inputs, drafts, requests, context) for drafts in range(k + 1)],
        "best": [_best(inputs, one, tokens) for one in concurrencies for tokens in contexts],
    }


def _row(inputs: Inputs, drafts: int, requests: int, context: int) -> dict[str, float]:
    seconds = inputs.cost.seconds_per_token(inputs.acceptance, drafts, requests, context)
    return {
        "drafts": drafts,
        "acceptance_length": expected_tokens(inputs.acceptance, drafts),
        "ms_per_token": seconds * 1e3,
        "speedup": inputs.cost.seconds(0, requests, context) / seconds,
        "break_even_length": inputs.cost.break_even_length(drafts, requests, context),
    }


def _best(inputs: Inputs, requests: int, context: int) -> dict[str, Any]:
    best = inputs.cost.best_drafts(inputs.acceptance, inputs.drafts, requests, context)
    return {"concurrency": requests, "context": context, **_row(inputs, best, requests, context)}


def as_text(figures: dict[str, Any]) -> str:
    """The plan for a terminal, with the speedup by K as bars."""
    k, length = figures["drafts"], figures["acceptance_length"]
    lines = [
        f"From {figures['source']}: {k} drafts, {length:.2f} tokens a cycle.",
        "",
        f"plain decoding   {figures['plain_ms_per_token']:8.2f} ms a token",
        f"a cycle          {figures['cycle_ms']:8.2f} ms, of which the drafter {figures['draft_ms']:.2f} ms",
        f"with speculation {figures['ms_per_token']:8.2f} ms a token, {figures['speedup']:.2f} times plain decoding",
        f"break-even       {figures['break_even_length']:8.2f} tokens a cycle",
        "",
        " K  tokens  ms/token  speedup",
    ]
    widest = max(row["speedup"] for row in figures["by_drafts"])
    for row in figures["by_drafts"]:
        bar = "#" * max(1, round(row["speedup"] / widest * BAR))
        numbers = f"{row['drafts']:2}  {row['acceptance_length']:6.2f}  {row['ms_per_token']:8.2f}"
        lines.append(f"{numbers}  {row['speedup']:6.2f}x {bar}")
    lines += ["", "Best K by concurrency and context:"]
    lines += [
        f"  {row['concurrency']:5} requests of {row['context']:6} tokens: K = {row['drafts']}, {row['speedup']:.2f}x"
        for row in figures["best"]
    ]
    if figures["flat"]:
        lines += [
            "",
            "These times are one point: what verifying costs at other batches is not in them, and every batch gets the",
            "same K. Give ROWS:MS pairs, --cost-table or --bench to plan by concurrency.",
        ]
    return "\n".join(lines)
