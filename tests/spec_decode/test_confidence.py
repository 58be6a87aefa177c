# SPDX-License-Identifier: Apache-2.0
"""q as a witness of acceptance, and blocks that are cut where a row costs more than it promises."""

import random

import pytest

from vllm_dflash.spec_decode.acceptance import Acceptance
from vllm_dflash.spec_decode.block_length import BlockLength
from vllm_dflash.spec_decode.confidence import Confidence, Savings, worth_verifying
from vllm_dflash.spec_decode.step_costs import Step


def blocks(count: int, seed: int = 0, slots: int = 7):
    """(modes, number of leading drafts that would be accepted): a mode of q is accepted with 0.8 of its probability."""
    draw = random.Random(seed)
    for _ in range(count):
        modes = [draw.choice([0.25, 0.6, 0.98]) for _ in range(slots)]
        good = 0
        while good < slots and draw.random() < 0.8 * modes[good]:
            good += 1
        yield modes, good


def test_rates_start_at_q_and_become_what_was_accepted():
    confidence = Confidence()
    assert confidence.rates([0.3, 0.97]) == [0.3, 0.97]
    for modes, good in blocks(2000):
        confidence.observe(modes, 7, good)
    assert confidence.rates([0.25, 0.6, 0.98]) == pytest.approx([0.2, 0.48, 0.784], abs=0.05)


def test_only_what_was_judged_is_learnt():
    confidence = Confidence()
    for _ in range(50):
        confidence.observe([0.6, 0.98, 0.25], 2, 0)
    sure, low = confidence.rates([0.98, 0.25])
    assert (sure, low) == (0.98, 0.25) and confidence.rates([0.6])[0] < 0.1


@pytest.mark.parametrize(
    ("rates", "price", "kept"),
    [
        ([0.9, 0.8, 0.7], 0.0, 3),
        ([0.9, 0.8, 0.7], 0.6, 2),
        ([0.9, 0.5, 0.99], 0.45, 2),  # 0.9 * 0.5 * 0.99 is less than 0.45
        ([0.1, 0.9], 0.5, 1),
        ([], 0.5, 0),
    ],
)
def test_a_draft_is_verified_while_it_promises_more_than_its_row_costs(rates, price, kept):
    assert worth_verifying(rates, price) == kept


def test_savings_count_rows_and_tokens_of_blocks_with_and_without_the_cut():
    savings = Savings(3)
    for _ in range(400):
        savings.observe([0.5, 0.5, 0.5], 0.2)
    assert savings.rows == pytest.approx([0, 1, 2, 2])
    assert savings.kept_share == pytest.approx([1, 1, 1, 1.75 / 1.875])


def test_what_is_cut_counts_as_it_promised():
    """By position the record is the same with blocks cut or whole; left out, drafts would look better than they are."""
    whole, cut, left_out = Acceptance(7), Acceptance(7), Acceptance(7)
    lengths = []
    for modes, good in blocks(3000):
        rates = [0.8 * mode for mode in modes]
        kept = worth_verifying(rates, 0.3)
        lengths.append(kept)
        beyond = [rates[kept:]]
        whole.observe(["r"], [7], [good])
        cut.observe(["r"], [kept], [min(good, kept)], beyond=beyond)
        left_out.observe(["r"], [kept], [min(good, kept)])
    assert 1 < sum(lengths) / len(lengths) < 4
    expected = sum(0.8 * mode for mode in (0.25, 0.6, 0.98)) / 3
    for k in range(3):
        assert cut.by_position()[k] == pytest.approx(expected, abs=0.08)
        assert whole.by_position()[k] == pytest.approx(expected, abs=0.08)
    assert left_out.by_position()[1] > expected + 0.1


def settled(row_seconds: float) -> BlockLength:
    """A controller that has seen blocks of three accepted drafts, a step being 10 ms and so much a row."""
    controller = BlockLength(7)
    draw = random.Random(0)
    drafts = 0
    for _ in range(400):
        controller.verified(["r"], [drafts], [min(drafts, draw.choice([1, 3, 5]))])
        rows, drafts = 1 + drafts, controller.plan(["r"], 1000)[0]
        seconds = 0.01 + row_seconds * rows + (0.001 if drafts else 0)
        controller.observe(Step(seconds, rows, 1, 1000, 0.001 if drafts else 0, 8 if drafts else 0, 1 if drafts else 0))
    return controller


def test_the_price_of_a_row_is_what_its_time_yields_elsewhere():
    free, dear = settled(0.0), settled(0.0015)
    assert free.price < 0.01
    # 1.5 ms of a cycle that yields three to four tokens in some 17 ms.
    assert 0.2 < dear.price < 0.4
    modes = [[0.9, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3]]
    assert free.cut([7], modes)[0] == [7]
    kept, beyond = dear.cut([7], modes)
    assert 1 <= kept[0] <= 3 and len(beyond[0]) == 7 - kept[0]


def test_cutting_makes_drafts_look_worth_more_where_rows_are_dear():
    """Blocks of which a third is good: verified whole they do not pay, cut where q is low they do."""
    controller = settled(0.0015)
    load = controller._load
    before = controller._value(load, [7] * 5)
    for _ in range(200):
        controller.cut([7], [[0.3] * 7])
    assert controller._value(load, [7] * 5) > 1.1 * before


def test_a_probe_is_not_cut():
    """It is there to tell about all its positions, and was weighed with all its rows."""
    controller = BlockLength(3)
    controller.price = 0.5
    modes = [[0.9, 0.05, 0.05]]
    assert controller.cut([3], modes)[0] == [3]
    controller.lengths = (3,) * 5
    assert controller.cut([3], modes)[0] == [1]
