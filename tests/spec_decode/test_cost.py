# SPDX-License-Identifier: Apache-2.0
"""The cost model against figures worked out by hand."""

import math
import random

import pytest

from vllm_dflash.spec_decode import cost
from vllm_dflash.spec_decode.cost import CycleCost, ForwardCost


def _flat(draft: float, verify: float) -> CycleCost:
    return CycleCost(ForwardCost({1: verify}), ForwardCost({1: draft}))


@pytest.mark.parametrize("tokens, expected", [(6, 3.83e-3), (2, 11.5e-3)])
def test_time_per_token_is_cycle_over_tokens(tokens, expected):
    """Draft 3 ms, verify 20 ms."""
    acceptance = [1.0] * (tokens - 1) + [0.0]
    assert math.isclose(_flat(3e-3, 20e-3).seconds_per_token(acceptance, 7, 1, 500), expected, rel_tol=1e-3)


def test_break_even_is_the_length_at_which_both_take_the_same_time():
    model = CycleCost(ForwardCost({1: 23e-3, 64: 80e-3}), ForwardCost({1: 16e-3}), block=8)
    for drafts in range(1, 8):
        length = model.break_even_length(drafts, 8, 100)
        assert math.isclose(model.seconds(drafts, 8, 100) / length, model.seconds(0, 8, 100))


def test_expected_tokens():
    assert cost.expected_tokens([0.5, 0.5], 0) == 1
    assert math.isclose(cost.expected_tokens([0.5], 3), 1 + 0.5 + 0.25 + 0.125)
    assert math.isclose(cost.expected_tokens([0.9, 0.5, 0.2], 3), 1 + 0.9 + 0.45 + 0.09)
    assert cost.expected_tokens([1.0], 7) == 8


def test_expected_tokens_is_the_mean_of_drawn_cycles():
    draw = random.Random(3)
    acceptance = [0.9, 0.8, 0.5, 0.7]
    lengths = []
    for _ in range(40_000):
        accepted = 0
        while accepted < 4 and draw.random() < acceptance[accepted]:
            accepted += 1
        lengths.append(1 + accepted)
    assert abs(sum(lengths) / len(lengths) - cost.expected_tokens(acceptance, 4)) < 0.03


@pytest.mark.parametrize("length", [1.0, 1.5, 3.49, 7.0, 8.0])
def test_constant_acceptance_gives_back_its_length(length):
    assert math.isclose(cost.expected_tokens([cost.constant_acceptance(length, 7)], 7), length, rel_tol=1e-6)


def test_constant_acceptance_refuses_what_cannot_be():
    with pytest.raises(ValueError, match=r"1 to 8, it cannot be 8\.5"):
        cost.constant_acceptance(8.5, 7)


def test_a_forward_is_linear_between_its_points_and_goes_on_by_the_last_slope():
    forward = ForwardCost({1: 10.0, 9: 18.0, 17: 34.0})
    assert [forward.seconds(rows, 1, 0) for rows in (1, 5, 9, 13, 17, 25)] == [10, 14, 18, 26, 34, 50]
    assert forward.seconds(0, 0, 0) == 0


def test_context_counts_once_a_request_and_once_a_row_and_ends_at_the_window():
    assert ForwardCost({1: 1.0}, context_token=0.5).seconds(8, 2, 100) == 1 + 2 * 100 * 0.5
    assert ForwardCost({1: 1.0}, row_context_token=0.5).seconds(8, 2, 100) == 1 + 8 * 100 * 0.5
    assert ForwardCost({1: 1.0}, context_token=0.5, window=10).seconds(8, 2, 100) == 1 + 2 * 10 * 0.5


def test_best_drafts_follows_load_and_acceptance():
    """Stock's cycles on two cores (vllm#42505's kind): one stream may gain, eight lose with any acceptance under 4."""
    model = CycleCost(
        ForwardCost({1: 16.5e-3, 8: 23e-3, 16: 31e-3, 64: 78e-3}), ForwardCost({1: 10e-3, 8: 11e-3, 64: 18e-3}), block=8
    )
    assert model.best_drafts([0.95], 7, 1, 100) == 7
    assert model.best_drafts([0.3], 7, 1, 100) == 0
    assert model.best_drafts([0.3], 7, 8, 100) == 0
    assert model.break_even_length(7, 8, 100) > 4
    assert 0 < model.best_drafts([0.95, 0.95, 0.0], 7, 1, 100) <= 2


def test_a_table_from_json():
    model = cost.as_cycle_cost(
        {"target": {"rows": {"1": 0.02, "8": 0.03}, "context_token": 1e-6}, "draft": {"rows": {"8": 0.003}}, "block": 8}
    )
    assert math.isclose(model.seconds(7, 1, 1000), 0.03 + 1e-3 + 0.003)


def test_no_costs_and_no_acceptance_are_refused():
    with pytest.raises(ValueError, match="seconds by row count"):
        ForwardCost({})
    with pytest.raises(ValueError, match="at least one value"):
        cost.expected_tokens([], 2)
