# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.soak`: a long soak of a tiny trained pair on real vLLM, and exit 1 if a promise broke."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.soak.check import soak_pair
from tests.support.pairs import TRAINED, trained_pair


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1")
    parser.add_argument("--architecture", choices=tuple(TRAINED), default="dflash2")
    arguments = parser.parse_args()
    cache = Path(tempfile.gettempdir()) / "vllm-dflash-trained"
    pair = trained_pair(cache, TRAINED[arguments.architecture])
    started = time.monotonic()
    report, broken = soak_pair(pair, arguments.runner, arguments.steps, arguments.seed)
    seconds = time.monotonic() - started
    print(f"runner {arguments.runner}, {arguments.architecture}, seed {arguments.seed}: {seconds:.0f} s")
    for name, value in vars(report).items():
        if name not in ("rss", "leaked", "greedy"):
            print(f"  {name.replace('_', ' '):20} {value:,}")
    print(f"  {'memory grew by':20} {report.growth / 2**20:.1f} MiB over the last half")
    print(f"  {'replayed alone':20} {len(report.greedy):,}")
    print(f"  {'resident, MiB':20} {' '.join(f'{rss / 2**20:.1f}' for rss in report.rss)}")
    for line in broken:
        print(f"broken: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
