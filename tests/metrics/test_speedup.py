# SPDX-License-Identifier: Apache-2.0
"""The estimate of speedup against step times that are made up, so that the true ratio is known."""

import random

import pytest

from vllm_dflash.metrics.speedup import Speedup, TargetCost
from vllm_dflash.spec_decode import Timing

K = 7
OVERHEAD = 0.002


def target_seconds(rows: float) -> float:
    return 0.010 + 0.0005 * rows


def run(estimate: Speedup, hands: list[float], sizes: list[int], tokens: float, drafts: int = K, late: int = 0) -> None:
    """Decoding steps of these batch sizes; `late`: steps that pass until a step's parts are known."""
    waiting: list[tuple[list[Timing], int, int]] = []
    for step, requests in enumerate(sizes, start=1 + int(hands[1])):
        stages = {"target": target_seconds(requests * (1 + drafts))}
        if drafts:
            stages |= {"verify": 0.001, "inject": 0.0005, "draft": 0.003, "select": 0.001}
        timings = [Timing(stage, s, requests * (1 + drafts), requests, 0, step) for stage, s in stages.items()]
        waiting.append((timings, step, requests))
        hands[0] += sum(stages.values()) + OVERHEAD
        if len(waiting) > late:
            timings, at, size = waiting.pop(0)
            estimate.tokens(at, size, round(size * tokens))
            for timing in timings:
                estimate.timing(timing)
        estimate.end_step(step)
        hands[1] = step


def truth(requests: int, tokens: float) -> float:
    spec = target_seconds(requests * (1 + K)) + 0.0055 + OVERHEAD
    return tokens * (target_seconds(requests) + OVERHEAD) / spec


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("requests", [1, 4, 32])
def test_the_true_ratio_where_plain_steps_occurred(requests: int, late: int) -> None:
    hands = [0.0, 0.0]
    estimate = Speedup(now=lambda: hands[0])
    run(estimate, hands, [requests] * 20, 1.0, drafts=0)
    run(estimate, hands, [requests] * 1500, 3.0, late=late)
    assert estimate.ratio() == pytest.approx(truth(requests, 3.0), rel=0.02)


def test_close_to_the_true_ratio_from_steps_with_drafts_alone() -> None:
    hands = [0.0, 0.0]
    estimate = Speedup(now=lambda: hands[0])
    sizes = random.Random(0)
    run(estimate, hands, [sizes.choice([1, 2, 3, 4]) for _ in range(500)], 2.0)
    run(estimate, hands, [1] * 1500, 2.0)
    assert estimate.ratio() == pytest.approx(truth(1, 2.0), rel=0.05)


def test_a_losing_drafter_is_below_one() -> None:
    hands = [0.0, 0.0]
    estimate = Speedup(now=lambda: hands[0])
    run(estimate, hands, [8] * 50, 1.0, drafts=0)
    run(estimate, hands, [8] * 800, 1.0)
    assert estimate.ratio() < 0.7


def test_pauses_between_requests_do_not_count() -> None:
    hands = [0.0, 0.0]
    estimate = Speedup(now=lambda: hands[0])
    run(estimate, hands, [1] * 50, 1.0, drafts=0)
    for _ in range(40):
        run(estimate, hands, [1] * 30, 3.0)
        hands[0] += 60.0
    assert estimate.ratio() == pytest.approx(truth(1, 3.0), rel=0.02)


def test_no_estimate_from_nothing_or_one_size_of_batch() -> None:
    hands = [0.0, 0.0]
    estimate = Speedup(now=lambda: hands[0])
    assert estimate.ratio() is None
    run(estimate, hands, [4] * 100, 2.0)
    assert estimate.ratio() is None


def test_costs_between_and_beyond_what_was_measured() -> None:
    cost = TargetCost()
    assert cost.seconds(8) is None
    cost.add(8, 0.014)
    assert cost.seconds(8) == 0.014 and cost.seconds(1) is None
    cost.add(32, 0.026)
    assert cost.seconds(16) == pytest.approx(0.018)
    assert cost.seconds(1) == pytest.approx(0.0105)
    assert cost.seconds(64) == pytest.approx(0.042)
