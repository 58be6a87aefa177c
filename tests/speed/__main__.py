# SPDX-License-Identifier: Apache-2.0
"""python -m tests.speed: tokens a second of `"block_length": "auto"` against plain decoding and all drafts, on this
machine with the demo pair, the three interleaved in one run. Ends with 1 if auto is under 0.95 of the better anywhere.

What was measured is kept in --out: the command can be interrupted, and repeated it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from tests.speed import probes
from tests.support.engine import EngineProcess
from vllm_dflash.bench.prompts import read_prompts
from vllm_dflash.checkpoint import load_draft

MODES = ("plain", "auto", "fixed")
BOUND = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.speed", description=__doc__)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--drafter", type=Path, default=Path(".demo/drafter"))
    parser.add_argument("--out", type=Path, default=Path(".demo/speed.jsonl"))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32], help="at once")
    parser.add_argument("--kinds", nargs="+", default=["code", "prose"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="a request")
    parser.add_argument("--waves", type=int, default=4, help="requests a place, one behind the other")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    cells = [
        (turn, kind, requests, mode)
        for turn in range(arguments.rounds)
        for kind in arguments.kinds
        for requests in arguments.requests
        # Nobody is always the first after a change of load.
        for mode in (*MODES[turn % 3 :], *MODES[: turn % 3])
    ]
    found = read(arguments.out)
    due = [cell for cell in cells if cell not in found]
    if due:
        engines = start(arguments)
        prompts = read_prompts(None)
        for number, (turn, kind, requests, mode) in enumerate(due, start=1):
            # Each place serves so many prompts, one behind the other.
            chosen = [prompts[kind][i % len(prompts[kind])] for i in range(turn, turn + requests * arguments.waves)]
            sampling = {"temperature": 0, "max_tokens": arguments.tokens, "ignore_eos": True}
            figures = engines[mode].probe(probes.serve, chosen, sampling, requests)
            record(arguments.out, (turn, kind, requests, mode), figures)
            rate = figures["rate"]
            print(f"{number}/{len(due)} {kind} {requests:2} at once, {mode:5}: {rate:7.1f} tokens/s", flush=True)
        for engine in engines.values():
            engine.close()
    return summary(read(arguments.out), cells)


def start(arguments: argparse.Namespace) -> dict[str, EngineProcess]:
    drafts = load_draft(str(arguments.drafter)).config.num_draft_tokens
    engines = {}
    for mode in MODES:
        engine = engines[mode] = EngineProcess(threads=arguments.threads)
        options = {"plain": {}, "auto": {"block_length": "auto"}, "fixed": {"block_length": drafts}}[mode]
        engine.start(
            arguments.target.resolve(),
            None if mode == "plain" else arguments.drafter.resolve(),
            additional_config={"dflash": options},
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=max(arguments.requests),
            max_num_batched_tokens=2048,
            num_gpu_blocks_override=None,
            enable_prefix_caching=False,
            traced=False,
        )
        engine.probe(probes.serve, ["Once upon a time"], {"temperature": 0, "max_tokens": 8, "ignore_eos": True}, 1)
    return engines


def read(path: Path) -> dict[tuple, dict]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {tuple(entry["cell"]): entry for entry in map(json.loads, lines)}


def record(path: Path, cell: tuple, figures: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"cell": cell, "at": time.strftime("%F %T")} | figures) + "\n")


def summary(found: dict[tuple, dict], cells: list[tuple]) -> int:
    """The median over the rounds of auto's rate over the better of the other two's, each round by itself."""
    print("\nkind   at once    plain     auto    fixed   auto/better   drafts a request and step")
    worst = 2.0
    for kind, requests in dict.fromkeys((kind, requests) for _, kind, requests, _ in cells):
        turns = {turn for turn, k, r, _ in cells if (k, r) == (kind, requests)}
        rates = {mode: [found[turn, kind, requests, mode]["rate"] for turn in turns] for mode in MODES}
        ratios = [a / max(p, f) for p, a, f in zip(rates["plain"], rates["auto"], rates["fixed"], strict=True)]
        drafts = statistics.mean(found[turn, kind, requests, "auto"]["drafts"] for turn in turns)
        middle = statistics.median(ratios)
        worst = min(worst, middle)
        shown = "".join(f"{statistics.median(rates[mode]):9.1f}" for mode in MODES)
        print(f"{kind:6} {requests:7} {shown}   {middle:11.3f}   {drafts:.2f}")
    print(f"least {worst:.3f}, {BOUND} is wanted")
    return 0 if worst >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
