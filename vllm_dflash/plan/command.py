# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash plan`: arguments and output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

EPILOG = """\
Give the times by hand, or one of --bench, --metrics and --cost-table.
A time is milliseconds, or ROWS:MS pairs such as 1:18,8:20,64:31, where ROWS are all requests' rows of one forward.

example: vllm-dflash plan --draft-ms 3 --verify-ms 20 --accepted 6
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="vllm-dflash plan",
        usage="vllm-dflash plan [options]",
        description="What speculation costs and gains: time a token, speedup, break-even, and the best number of\n"
        "drafts by concurrency and context, by the same cost model as the server's block length controller.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    times = made.add_argument_group("times")
    times.add_argument("--draft-ms", metavar="MS", help="one forward of the drafter")
    times.add_argument("--verify-ms", metavar="MS", help="one forward of the target over the drafts")
    times.add_argument(
        "--plain-ms", metavar="MS", type=float, help="one step of plain decoding (default: as --verify-ms)"
    )
    times.add_argument(
        "--context-ms", metavar="MS", type=float, default=0.0, help="what 1000 context tokens add a request"
    )
    times.add_argument("--bench", metavar="FILE", type=Path, help="result.json of `vllm-dflash bench`")
    times.add_argument("--group", metavar="NAME", help="the group of that result (default: the first DFlash one)")
    times.add_argument("--metrics", metavar="URL", help="a running server, or its /metrics")
    times.add_argument("--cost-table", metavar="FILE", type=Path, help="a cost table as JSON")
    accepted = made.add_argument_group("acceptance")
    accepted.add_argument("--accepted", metavar="N", type=float, help="tokens a cycle, the target's own counted")
    accepted.add_argument(
        "--acceptance", metavar="P,P", help="chance of each draft, given that those before it were accepted"
    )
    accepted.add_argument(
        "--drafts", metavar="K", type=int, help="drafts a cycle (default: from the acceptance, 7 at least)"
    )
    out = made.add_argument_group("output")
    out.add_argument(
        "--concurrency", metavar="N,N", default="1,8,32,128", help="running requests (default: 1,8,32,128)"
    )
    out.add_argument("--context", metavar="N,N", default="1024,16384", help="context tokens (default: 1024,16384)")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--html", metavar="FILE", type=Path, help="write a page with the plots, complete in itself")
    return made


def run(argv: Sequence[str]) -> int:
    """`vllm-dflash plan`; the exit code."""
    from vllm_dflash.plan import table

    made = parser()
    options = made.parse_args(list(argv))
    try:
        inputs = read(options)
        figures = table.plan(inputs, _counts(options.concurrency, 1), _counts(options.context, 0))
    except ValueError as error:
        made.error(str(error))
    if options.html is not None:
        from vllm_dflash.plan.page import page

        options.html.write_text(page(figures))
    print(json.dumps(figures, indent=2) if options.json else table.as_text(figures))
    return 0


def read(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """The Inputs that the arguments name. Raises ValueError where they are incomplete or name two sources."""
    from vllm_dflash.plan import inputs

    sources = [name for name in ("bench", "metrics", "cost_table") if getattr(options, name) is not None]
    by_hand = options.draft_ms is not None or options.verify_ms is not None
    if len(sources) + by_hand != 1:
        raise ValueError("Give --draft-ms and --verify-ms, or one of --bench, --metrics and --cost-table.")
    chances = None
    if options.acceptance is not None:
        try:
            chances = [float(part) for part in options.acceptance.split(",")]
        except ValueError:
            raise ValueError(f"--acceptance is {options.acceptance!r}; give numbers such as 0.9,0.8,0.7.") from None
        if not all(0 <= chance <= 1 for chance in chances):
            raise ValueError(f"--acceptance is {options.acceptance!r}; chances are from 0 to 1.")
    if options.bench is not None:
        return inputs.from_bench(options.bench, options.group)
    if options.metrics is not None:
        return inputs.from_metrics(options.metrics, options.plain_ms)
    if options.cost_table is not None:
        return inputs.from_table(options.cost_table, chances, options.accepted, options.drafts)
    if options.draft_ms is None or options.verify_ms is None:
        raise ValueError("Both times are needed, --draft-ms and --verify-ms.")
    if options.accepted is None and chances is None:
        raise ValueError("Give --accepted, or --acceptance by position.")
    return inputs.by_hand(
        options.draft_ms,
        options.verify_ms,
        options.plain_ms,
        options.accepted or 1.0,
        chances,
        options.drafts,
        options.context_ms,
    )


def _counts(text: str, least: int) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < least:
        raise ValueError(f"{text!r} is no list of whole numbers from {least} on, such as 1,8,32.")
    return counts
