# SPDX-License-Identifier: Apache-2.0
"""The cost tables that come with the package, and the loads to try on them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from vllm_dflash.bench.simulator.simulate import Load
from vllm_dflash.spec_decode.cost import CycleCost, as_cycle_cost

TABLES = Path(__file__).parent / "tables"
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (500, 4_000, 32_000, 185_000)
LENGTHS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
# More context than this in all fits into no machine of the tables.
MOST_CONTEXT = 8_000_000


def names() -> list[str]:
    return sorted(path.stem for path in TABLES.glob("*.json"))


def table(name: str) -> CycleCost:
    return as_cycle_cost(json.loads((TABLES / f"{name}.json").read_text()))


def drafts_of(name: str) -> int:
    """K of the table's drafter."""
    return (table(name).block or 8) - 1


def all_loads(seed: int = 0) -> list[Load]:
    """Every combination that fits, in an order drawn from the seed."""
    loads = [
        Load(requests, context, length)
        for requests, context, length in itertools.product(REQUESTS, CONTEXTS, LENGTHS)
        if requests * context <= MOST_CONTEXT
    ]
    random.Random(seed).shuffle(loads)
    return loads
