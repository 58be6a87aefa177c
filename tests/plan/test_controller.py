# SPDX-License-Identifier: Apache-2.0
"""`plan` and the server's block length controller choose the same K for the same costs."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from vllm_dflash.plan.inputs import from_table
from vllm_dflash.plan.table import plan
from vllm_dflash.spec_decode.block_length import BlockLength
from vllm_dflash.spec_decode.cost import CycleCost
from vllm_dflash.spec_decode.step_costs import Step

ACCEPTANCE = [0.9, 0.85, 0.8, 0.05, 0.05, 0.05, 0.05]
CONTEXT = 1000
BLOCK = 8
# Bound by memory up to some rows, then by arithmetic: the more requests, the dearer a row to verify.
COST = {
    "target": {"rows": {"1": 0.020, "8": 0.024, "32": 0.034, "128": 0.050, "512": 0.220}, "context_token": 1e-7},
    "draft": {"rows": {"8": 0.003, "512": 0.020}},
    "block": BLOCK,
    "step": 0.001,
}


def chosen_by_the_controller(cost: CycleCost, requests: int) -> int:
    """The number of drafts most used in the last of 3,000 steps that take what `cost` says."""
    controller, draw = BlockLength(len(ACCEPTANCE), BLOCK), random.Random(1)
    names = [f"r{number}" for number in range(requests)]
    used: Counter[int] = Counter()
    for step in range(3000):
        lengths = controller.plan(names, requests * CONTEXT)
        drafting = sum(1 for length in lengths if length)
        rows = requests + sum(lengths)
        draft = cost.draft.seconds(drafting * BLOCK, drafting, CONTEXT)
        seconds = cost.step + cost.target.seconds(rows, requests, CONTEXT) + draft
        accepted = [drawn(length, draw) for length in lengths]
        controller.observe(Step(seconds, rows, requests, requests * CONTEXT, draft, drafting * BLOCK, drafting))
        controller.verified(names, lengths, accepted)
        if step >= 2000:
            used.update(lengths)
    return used.most_common(1)[0][0]


def drawn(drafts: int, draw: random.Random) -> int:
    """How many of these drafts are accepted."""
    return next((k for k in range(drafts) if draw.random() >= ACCEPTANCE[k]), drafts)


def planned(folder: Path, requests: int) -> tuple[int, CycleCost]:
    """(`plan`'s best K, the cost it planned with)."""
    file = folder / "cost.json"
    file.write_text(json.dumps(COST | {"acceptance": ACCEPTANCE}))
    inputs = from_table(file, None, None, None)
    (best,) = plan(inputs, [requests], [CONTEXT])["best"]
    return best["drafts"], inputs.cost


@pytest.mark.parametrize(("requests", "drafts"), [(4, 3), (16, 3), (32, 3), (64, 2), (128, 0)])
def test_best_k_is_the_controllers_choice(tmp_path: Path, requests: int, drafts: int) -> None:
    best, cost = planned(tmp_path, requests)
    assert best == drafts
    assert best == chosen_by_the_controller(cost, requests)


@pytest.mark.parametrize("requests", [1, 48])
def test_where_two_are_nearly_equal_the_controllers_is_hardly_slower(tmp_path: Path, requests: int) -> None:
    """The controller keeps what it has unless another promises 1.5 % more, and knows costs by what it measured."""
    best, cost = planned(tmp_path, requests)
    chosen = chosen_by_the_controller(cost, requests)
    ratio = [cost.seconds_per_token(ACCEPTANCE, k, requests, CONTEXT) for k in (chosen, best)]
    assert ratio[0] <= 1.04 * ratio[1]
