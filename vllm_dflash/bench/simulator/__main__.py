# SPDX-License-Identifier: Apache-2.0
"""python -m vllm_dflash.bench.simulator: the controller over loads from cost tables."""

from __future__ import annotations

import argparse
import statistics

from vllm_dflash.bench.simulator.loads import all_loads, drafts_of, names, table
from vllm_dflash.bench.simulator.simulate import Simulator


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vllm_dflash.bench.simulator", description=__doc__)
    parser.add_argument("--table", choices=names(), action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the loads and of what is drawn")
    parser.add_argument("--most", type=int, help="loads a table")
    parser.add_argument("--worst", type=int, default=5, help="how many loads to print a table")
    arguments = parser.parse_args(argv)
    print("tokens/s of the controller over the better of plain decoding and the best fixed K, after 200 steps")
    for name in arguments.table or names():
        simulator = Simulator(table(name), drafts_of(name), arguments.seed)
        outcomes = [simulator.run(load) for load in all_loads(arguments.seed)[: arguments.most]]
        ratios = sorted(outcome.ratio for outcome in outcomes)
        low = sum(ratio < 0.97 for ratio in ratios)
        print(
            f"\n{name}: {len(ratios)} loads, least {ratios[0]:.3f}, median {statistics.median(ratios):.3f}, "
            f"{low} under 0.97"
        )
        for outcome in sorted(outcomes, key=lambda outcome: outcome.ratio)[: arguments.worst]:
            load = outcome.load
            print(
                f"  {outcome.ratio:.3f}  {load.requests:3} requests, {load.context:6} context, length {load.length}: "
                f"plain {outcome.plain:.0f}, K={outcome.drafts} {outcome.fixed:.0f}, "
                f"here {outcome.controller:.0f} with {outcome.mean_drafts:.1f} drafts"
            )


main()
