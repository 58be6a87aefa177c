# SPDX-License-Identifier: Apache-2.0
"""Costs learnt from samples, against the function that made them."""

import random

import pytest

from vllm_dflash.spec_decode.measured_cost import LASTING, Beside, MeasuredCost
from vllm_dflash.spec_decode.step_costs import Load, Step, StepCosts


def processor(rows: float, requests: int, context: float) -> float:
    """Attention's arithmetic grows with the rows."""
    return 0.015 + 0.001 * rows + 1e-7 * context * rows / requests


def accelerator(rows: float, requests: int, context: float) -> float:
    """Flat up to a knee; the KV is read once for all rows of a request."""
    return max(0.014, 0.0001 * rows) + 1.4e-8 * context


@pytest.fixture(params=[processor, accelerator])
def truth(request):
    return request.param


def measured(truth, loads, samples: int = 6, noise: float = 0.0) -> MeasuredCost:
    draw = random.Random(1)
    cost = MeasuredCost()
    for rows, requests, context in loads:
        for _ in range(samples):
            cost.observe(truth(rows, requests, context) * draw.gauss(1, noise), rows, requests, context)
    return cost


def test_nothing_measured_costs_nothing():
    assert MeasuredCost().seconds(8, 1, 500) == 0


def test_measured_loads_have_their_own_mean(truth):
    loads = [(4, 4, 2000), (32, 4, 2000), (4, 4, 400_000), (32, 4, 400_000), (256, 32, 64_000)]
    cost = measured(truth, loads, samples=60, noise=0.03)
    for load in loads:
        assert cost.seconds(*load) == pytest.approx(truth(*load), rel=0.03)


def test_other_loads_are_near(truth):
    """vllm#48627, vllm#54801: by rows and context, not by rows alone."""
    loads = [(1, 1, 500), (8, 1, 500), (8, 8, 4000), (64, 8, 4000), (1, 1, 100_000), (8, 1, 100_000), (128, 16, 8000)]
    cost = measured(truth, loads)
    for load in [(4, 1, 500), (32, 4, 2000), (2, 1, 30_000), (8, 1, 30_000), (32, 8, 4000)]:
        assert cost.seconds(*load) == pytest.approx(truth(*load), rel=0.25), load


def test_a_row_too_many_outliers_are_needed(truth):
    """Two outliers in a row change little, a machine that became slower is believed."""
    cost = measured(truth, [(8, 1, 500)], samples=30)
    true = truth(8, 1, 500)
    for _ in range(2):
        cost.observe(10 * true, 8, 1, 500)
    assert cost.seconds(8, 1, 500) == pytest.approx(true, rel=0.01)
    for _ in range(8):
        cost.observe(1.7 * true, 8, 1, 500)
    assert cost.seconds(8, 1, 500) == pytest.approx(1.7 * true, rel=0.1)


@pytest.mark.parametrize("first", [0, 1, 3, 30], ids=lambda first: f"after {first} samples")
def test_a_pause_of_the_machine_is_not_what_a_load_costs(truth, first):
    """Sixteen steps in a row at five times their cost, the load just begun or its shape never met before."""
    known = [(8, 8, 4000), (16, 8, 4000), (64, 8, 4000)]
    cost = measured(truth, known, samples=30)
    load = 32, 8, 4000
    cost.changed()
    for _ in range(first):
        cost.observe(truth(*load), *load)
    for _ in range(16):
        cost.observe(5 * truth(*load), *load)
    assert cost.seconds(*load) == pytest.approx(truth(*load), rel=0.25)


def test_what_lasts_is_no_pause(truth):
    cost = measured(truth, [(8, 1, 500)], samples=30)
    for _ in range(LASTING + 8):
        cost.observe(3 * truth(8, 1, 500), 8, 1, 500)
    assert cost.seconds(8, 1, 500) == pytest.approx(3 * truth(8, 1, 500), rel=0.1)


def test_a_load_first_measured_in_a_pause_is_righted_by_two_samples(truth):
    cost = MeasuredCost()
    for _ in range(8):
        cost.observe(5 * truth(8, 8, 4000), 8, 8, 4000)
    cost.observe(truth(8, 8, 4000), 8, 8, 4000)
    assert cost.is_doubtful(8, 8, 4000)
    cost.observe(truth(8, 8, 4000), 8, 8, 4000)
    assert cost.seconds(8, 8, 4000) == pytest.approx(truth(8, 8, 4000)) and not cost.is_doubtful(8, 8, 4000)


def test_the_first_run_of_a_shape_may_be_slow(truth):
    cost = MeasuredCost()
    for factor in (20, 1, 1):
        cost.observe(factor * truth(8, 1, 500), 8, 1, 500)
    assert cost.seconds(8, 1, 500) == pytest.approx(truth(8, 1, 500))


def test_a_longer_context_is_dearer_before_it_is_measured(truth):
    cost = measured(truth, [(1, 1, 500), (1, 1, 8000), (1, 1, 30_000)])
    assert cost.seconds(1, 1, 185_000) == pytest.approx(truth(1, 1, 185_000), rel=0.3)
    assert cost.samples(1, 1, 185_000) == 0 and cost.samples(1, 1, 30_000) == 6


def test_most_of_five_being_outliers_moves_a_cost_by_little(truth):
    """Three outliers in five steps doubled a plain step's cost once, and the pace of the machine with it."""
    cost = measured(truth, [(8, 1, 500)], samples=30)
    true = truth(8, 1, 500)
    for factor in (5, 5, 1, 5, 1, 1, 1):
        cost.observe(factor * true, 8, 1, 500)
        assert cost.seconds(8, 1, 500) == pytest.approx(true, rel=0.02)


def test_a_lone_outlier_is_not_believed_against_its_neighbours(truth):
    """One draft that took five times as long kept drafting off for good: it looked too dear to be tried again."""
    cost = measured(truth, [(8, 1, 500), (16, 2, 500), (64, 8, 500), (64, 8, 4000)])
    cost.observe(5 * truth(32, 4, 500), 32, 4, 500)
    assert cost.seconds(32, 4, 500) < 1.5 * truth(32, 4, 500)


def test_what_drafting_takes_beside_the_draft_is_a_median_and_not_negative():
    beside = Beside()
    for seconds in (0.003, 0.05, -0.001, 0.003, 0.004):
        assert beside.seconds(32, 0.02) in (0.0, 0.003)
        beside.observe(seconds, 32, 0.02)
    assert beside.seconds(32, 0.02) == beside.seconds(40, 0.02) == 0.003 and beside.seconds(64, 0.02) == 0.0
    for _ in range(3):
        beside.observe(-0.002, 8, 0.02)
    assert beside.seconds(8, 0.02) == 0.0


def test_a_step_that_drafts_says_nothing_of_plain_decoding():
    """Its host work and the context it writes once stood in the cost of plain steps, 3 of 18 ms, and drafts paid."""
    costs = StepCosts(8)
    for _ in range(3):
        costs.observe(Step(0.015, 4, 4, 1000.0))
    load = Load(4, 1000.0, (0, 0, 4, 0, 0))
    for _ in range(20):
        costs.observe(Step(0.021, 4, 4, 1000.0, 0.003, 32, 4))
        costs.observe(Step(0.026, 12, 4, 1000.0, 0.003, 32, 4))
    assert costs.plain(load) == pytest.approx(0.015)
    assert costs.seconds(load, 4, 4) == pytest.approx(0.021)
    assert costs.seconds(load, 12, 4) == pytest.approx(0.026, rel=0.03)
    other = StepCosts(8)
    other.observe(Step(0.021, 4, 4, 1000.0, 0.003, 32, 4))
    assert other.plain(load) == 0.0


def test_the_noise_of_long_steps_is_nothing_that_drafts_take_beside_short_ones():
    beside = Beside()
    for seconds in (0.007, 0.008, 0.007):
        beside.observe(seconds, 32, 0.2)
    assert beside.seconds(32, 0.2) == 0.007 and beside.seconds(32, 0.02) == 0.0


def test_two_outliers_among_the_first_three_are_not_believed():
    cost = MeasuredCost()
    for seconds in (0.16, 0.032, 0.16):
        assert not cost.is_settled(16, 16, 8000)
        cost.observe(seconds, 16, 16, 8000)
    assert not cost.is_settled(16, 16, 8000)
    cost.observe(0.033, 16, 16, 8000)
    assert cost.is_settled(16, 16, 8000)
    assert cost.seconds(16, 16, 8000) == pytest.approx(0.033)
