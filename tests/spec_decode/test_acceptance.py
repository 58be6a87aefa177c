# SPDX-License-Identifier: Apache-2.0
"""Acceptance learnt from drawn cycles, against the rates they were drawn with."""

import random

from vllm_dflash.spec_decode.acceptance import AVERAGE, LEVELS, Acceptance


def feed(acceptance: Acceptance, rates: dict[str, list[float]], steps: int, drafts: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    for _ in range(steps):
        accepted = []
        for rate in rates.values():
            good = 0
            while good < drafts and draw.random() < rate[good]:
                good += 1
            accepted.append(good)
        acceptance.advance()
        acceptance.observe(list(rates), [drafts] * len(rates), accepted)


def test_rates_by_position():
    acceptance = Acceptance(4)
    feed(acceptance, {f"r{i}": [0.9, 0.5, 0.7, 0.2] for i in range(16)}, 60, 4)
    for found, true in zip(acceptance.by_position(), [0.9, 0.5, 0.7, 0.2], strict=True):
        assert abs(found - true) < 0.12


def test_positions_that_were_never_drafted_follow_the_one_before():
    acceptance = Acceptance(6)
    feed(acceptance, {"a": [0.8] * 6}, 200, 2)
    rates = acceptance.by_position()
    assert rates[1] > rates[2] > rates[5] > 0.5


def test_requests_are_told_apart_and_forgotten():
    acceptance = Acceptance(4)
    rates = {f"r{i}": [0.7] * 4 for i in range(6)} | {"good": [0.97] * 4, "bad": [0.1] * 4}
    feed(acceptance, rates, 120, 4)
    levels = dict(zip(rates, acceptance.levels(list(rates)), strict=True))
    assert LEVELS[levels["bad"]] < 0 < LEVELS[levels["good"]]
    acceptance.forget({"good"})
    assert acceptance.levels(["bad"]) == [AVERAGE]


def test_alike_requests_stay_near_the_average():
    """Levels made of noise would cost drafts that pay."""
    acceptance = Acceptance(7)
    rates = {f"r{i}": [0.96] * 7 for i in range(64)}
    feed(acceptance, rates, 100, 7)
    assert acceptance.levels(list(rates)).count(AVERAGE) > 50


def test_a_change_of_text_is_noticed_soon():
    acceptance = Acceptance(7)
    feed(acceptance, {"a": [0.05] * 7}, 400, 3)
    assert acceptance.by_position()[0] < 0.12
    feed(acceptance, {"a": [0.95] * 7}, 15, 3, seed=1)
    assert acceptance.by_position()[0] > 0.7


def test_without_news_the_record_fades_into_the_slow_average():
    acceptance = Acceptance(3, steps=50)
    feed(acceptance, {"a": [0.6] * 3}, 400, 3)
    before = acceptance.record
    for _ in range(100):
        acceptance.advance()
    assert abs(acceptance.record - before / 4) < 0.05 * before
    assert 0.4 < acceptance.by_position()[0] < 0.8


def test_no_drafts_say_nothing():
    acceptance = Acceptance(3)
    acceptance.observe(["a", "b"], [0, 0], [0, 0])
    assert acceptance.record == 0


def test_new_requests_leave_little_of_the_record():
    acceptance = Acceptance(4)
    assert acceptance.meet(["a"]) == 1.0
    feed(acceptance, {"a": [0.8] * 4}, 200, 4)
    assert acceptance.meet(["a"]) == 0.0 and acceptance.record > 40
    assert acceptance.meet(["a", "b"]) == 0.5
    assert acceptance.meet(["c"]) == 1.0 and acceptance.record < 7


def test_a_few_blocks_tell_about_all_positions():
    """Four blocks, all accepted: the last position is as likely as 28 drafts say, not as four do."""
    acceptance = Acceptance(7)
    acceptance.observe(["a"] * 4, [7] * 4, [7] * 4)
    assert acceptance.by_position()[6] > 0.85


def test_new_requests_keep_as_much_of_the_record_as_texts_are_alike():
    """Texts alike: a new one is expected to be like the last ones. Texts that differ: little is expected of it."""
    kept = {}
    for kind, rates in {"alike": (0.6, 0.6), "different": (0.2, 0.9)}.items():
        acceptance, draw = Acceptance(7), random.Random(0)
        for number in range(80):
            acceptance.meet([f"r{number}"])
            for _ in range(40):
                good = 0
                while good < 7 and draw.random() < rates[number % 2]:
                    good += 1
                acceptance.advance()
                acceptance.observe([f"r{number}"], [7], [good])
        acceptance.meet(["new"])
        kept[kind] = acceptance.record
    assert kept["different"] < 7
    assert kept["alike"] > 25
