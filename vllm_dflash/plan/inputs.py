# SPDX-License-Identifier: Apache-2.0
"""Times and acceptance to plan with: given by hand, from a bench result, or from a running server."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.spec_decode.cost import CycleCost, ForwardCost, as_cycle_cost, constant_acceptance

STAGES = ("target", "verify", "inject", "draft", "select")


@dataclass(frozen=True)
class Inputs:
    """A cost model in seconds, and the chance of each draft given that all before it were accepted.

    flat: whether the costs are one point, which says nothing about other batches. source: where they come from.
    """

    cost: CycleCost
    acceptance: tuple[float, ...]
    drafts: int
    source: str
    flat: bool


def by_hand(
    draft_ms: str,
    verify_ms: str,
    plain_ms: float | None,
    accepted: float,
    acceptance: Sequence[float] | None,
    drafts: int | None,
    context_ms: float,
) -> Inputs:
    """Inputs from the command's arguments.

    draft_ms, verify_ms: one number, or ROWS:MS,ROWS:MS. accepted: tokens a cycle, the target's own counted.
    acceptance: by position, and then `accepted` is not used. context_ms: what 1,000 context tokens of a request add.
    Raises ValueError, a sentence.
    """
    k = drafts or (len(acceptance) if acceptance else max(7, math.ceil(accepted) - 1))
    chances = tuple(acceptance) if acceptance else (constant_acceptance(accepted, k),)
    draft, verify = _times("--draft-ms", draft_ms), _times("--verify-ms", verify_ms)
    flat = len(draft) == 1 and len(verify) == 1 and plain_ms is None
    if plain_ms is not None:
        if len(verify) == 1:
            verify = {1 + k: next(iter(verify.values()))}
        verify = {1: plain_ms / 1e3} | {rows: seconds for rows, seconds in verify.items() if rows > 1}
    cost = CycleCost(ForwardCost(verify, context_token=context_ms / 1e6), ForwardCost(draft))
    return Inputs(cost, chances, k, "the times given", flat)


def _times(name: str, text: str) -> dict[int, float]:
    try:
        if ":" not in text:
            return {1: float(text) / 1e3}
        pairs = (part.split(":") for part in text.split(","))
        return {int(rows): float(ms) / 1e3 for rows, ms in pairs}
    except ValueError:
        raise ValueError(f"{name} is {text!r}; give milliseconds, or ROWS:MS,ROWS:MS such as 1:18,64:31.") from None


def from_table(path: Path, acceptance: Sequence[float] | None, accepted: float | None, drafts: int | None) -> Inputs:
    """A cost table in a file: the fields of CycleCost, and optionally "acceptance" by position."""
    table = read_json(path)
    try:
        cost = as_cycle_cost(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no cost table: {type(error).__name__}: {error}.") from None
    chances = tuple(acceptance or table.get("acceptance") or ())
    k = drafts or len(chances) or 7
    if not chances:
        if accepted is None:
            raise ValueError(f"{path} has no acceptance. Give --accepted, or --acceptance by position.")
        chances = (constant_acceptance(accepted, k),)
    return Inputs(cost, chances, k, str(path), False)


def from_bench(path: Path, group: str | None) -> Inputs:
    """Times of one speculating group of a result.json of `vllm-dflash bench`, against the plain group's.

    A step of plain decoding takes the median time per output token of the plain group, a cycle the speculating
    group's time per output token times its acceptance length; by the running requests of each cell.
    """
    result = read_json(path)
    summary = result.get("summary")
    if not isinstance(summary, list):
        raise ValueError(f"{path} is no result of `vllm-dflash bench`: it has no list 'summary'.")
    plain = {_point(cell): cell for cell in summary if cell["group"] == "plain"}
    speculating = [cell for cell in summary if cell.get("acceptance_length") and _point(cell) in plain]
    names = sorted({cell["group"] for cell in speculating})
    if not names:
        raise ValueError(f"{path} has no speculating group beside plain decoding.")
    name = group or next((one for one in names if one.startswith("dflash")), names[0])
    cells = [cell for cell in speculating if cell["group"] == name]
    if not cells:
        raise ValueError(f"{path} has no group {name}; it has {', '.join(names)}.")
    target: dict[int, list[float]] = {}
    draft: dict[int, list[float]] = {}
    drafts = max(len(cell["acceptance_by_position"]) for cell in cells)
    for cell in cells:
        rows = cell["concurrency"]
        base = plain[_point(cell)]["tpot_p50_ms"]["median"] / 1e3
        cycle = cell["tpot_p50_ms"]["median"] / 1e3 * cell["acceptance_length"]["median"]
        own = (cell.get("draft_ms") or {}).get("median")
        drafting = cycle - base if own is None else own / 1e3
        target.setdefault(rows, []).append(base)
        target.setdefault(rows * (1 + drafts), []).append(max(base, cycle - drafting))
        draft.setdefault(rows * (1 + drafts), []).append(max(0.0, drafting))
    cost = CycleCost(ForwardCost(_means(target)), ForwardCost(_means(draft)), block=1 + drafts)
    rates = [_mean(cell["acceptance_by_position"][j] for cell in cells) for j in range(drafts)]
    return Inputs(cost, conditional(rates), drafts, f"{path}, group {name}", False)


def _point(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[key] for key in ("workload", "context", "output", "concurrency", "temperature"))


def _means(values: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {key: _mean(several) for key, several in values.items()}


def _mean(values: Iterable[float]) -> float:
    several = list(values)
    return sum(several) / len(several)


def conditional(rates: Sequence[float]) -> tuple[float, ...]:
    """Chances given all before were accepted, from the shares of steps in which each position was accepted."""
    chances, before = [], 1.0
    for rate in rates:
        chances.append(min(1.0, rate / before) if before > 0 else 0.0)
        before = rate
    return tuple(chances)


def from_metrics(url: str, plain_ms: float | None) -> Inputs:
    """Means since the server's start from a /metrics page. Raises ValueError where it cannot be read or lacks them."""
    page = read_page(url if "/metrics" in url else url.rstrip("/") + "/metrics")
    values = totals(page)
    drafts = [
        int(key[1]) for key in values if key[0] == "vllm:spec_decode_num_accepted_tokens_per_pos_total" and key[1]
    ]
    steps = values.get(("vllm:spec_decode_num_drafts_total", ""), 0.0)
    if not drafts or not steps:
        raise ValueError(f"{url} shows no speculation yet: no drafts were verified since the server's start.")
    k = max(drafts) + 1
    rates = [values.get(("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(j)), 0.0) / steps for j in range(k)]
    seconds = {}
    for stage in STAGES:
        count = values.get((f"vllm_dflash:{stage}_seconds_count", ""), 0.0)
        seconds[stage] = values.get((f"vllm_dflash:{stage}_seconds_sum", ""), 0.0) / count if count else 0.0
    if not seconds["draft"] or not seconds["target"]:
        raise ValueError(
            f"{url} has acceptance but no vllm_dflash:draft_seconds and target_seconds. "
            "Give --draft-ms and --verify-ms."
        )
    verify, drafting = seconds["target"] + seconds["verify"], seconds["draft"] + seconds["select"] + seconds["inject"]
    rows = {1: verify} if plain_ms is None else {1: plain_ms / 1e3, 1 + k: verify}
    cost = CycleCost(ForwardCost(rows), ForwardCost({1: drafting}))
    return Inputs(cost, conditional(rates), k, url, plain_ms is None)


def totals(page: str) -> dict[tuple[str, str], float]:
    """(sample name, value of its label "position" or "") -> sum over all other labels, of a Prometheus text page."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("position", ""))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def read_page(url: str) -> str:
    """The text at `url`, proxies of the environment left aside. Raises ValueError, a sentence."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=10) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"{url} cannot be read: {reason}. Give the address of a running server.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, a sentence."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object.")
    return value
