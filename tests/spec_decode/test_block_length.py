# SPDX-License-Identifier: Apache-2.0
"""The controller, fed by hand."""

import math
import random

import pytest

from vllm_dflash.bench.simulator.simulate import Load, Simulator
from vllm_dflash.spec_decode.block_length import BlockLength
from vllm_dflash.spec_decode.cost import CycleCost, ForwardCost
from vllm_dflash.spec_decode.step_costs import Step

CHEAP = CycleCost(ForwardCost({1: 20e-3, 64: 21e-3}), ForwardCost({8: 3e-3}), block=8)
# Stock's cycles on two cores: 23 ms plain at 8 streams, 96 ms with K=7.
DEAR = CycleCost(ForwardCost({1: 15e-3, 8: 23e-3, 64: 80e-3}), ForwardCost({8: 6e-3, 64: 16e-3}), block=8)


def simulator(cost: CycleCost, **options) -> Simulator:
    return Simulator(cost, 7, **({"noise": 0.02, "outliers": 0.0} | options))


def test_fixed_lengths_are_fixed():
    controller = BlockLength(7, fixed=3)
    assert controller.plan(["a", "b"], 100) == [3, 3]
    with pytest.raises(ValueError, match="0 to 7 drafts here, it cannot be 8"):
        BlockLength(7, fixed=8)


def test_plain_decoding_is_measured_first():
    simulation = simulator(CHEAP)
    controller = simulation.controller
    assert controller.plan(["a"], 500) == [0] == controller.plan(["a"], 500)


def test_no_requests_no_lengths():
    assert BlockLength(7).plan([], 0) == []


def test_drafts_where_they_pay_and_not_where_they_do_not():
    """vllm#42505: slower than plain decoding above concurrency 8; here it stays plain."""
    assert simulator(CHEAP).run(Load(1, 500, 5.0)).mean_drafts > 5
    assert simulator(DEAR).run(Load(8, 500, 2.0)).mean_drafts < 0.2


def test_the_same_record_gives_the_same_lengths():
    outcomes = [simulator(CHEAP, seed=3, outliers=0.01).run(Load(8, 500, 2.0), 0, 300) for _ in range(2)]
    assert outcomes[0] == outcomes[1]


def test_probes_cost_little():
    """The worst case for probing: drafts are dear and nothing is ever accepted."""
    for requests in (1, 8, 32):
        outcome = simulator(DEAR).run(Load(requests, 500, 1.0))
        assert outcome.controller > 0.98 * outcome.plain, requests


def test_it_finds_its_way_back_from_none():
    """vllm#54691's kind, and omlx#1277's: off while it loses, on again when the text is predictable."""
    simulation = simulator(CHEAP)
    assert simulation.run(Load(4, 500, 1.0)).mean_drafts < 0.5
    outcome = simulation.run(Load(4, 500, 6.0))
    assert outcome.ratio > 0.97 and outcome.mean_drafts > 5


def test_hysteresis_keeps_the_choice_near_break_even():
    """omlx#3753: where both are worth the same, it does not flip every other step."""
    level = CycleCost(ForwardCost({1: 20e-3}), ForwardCost({8: 20e-3}), block=8)
    simulation = simulator(level)
    simulation.run(Load(8, 500, 2.0), 0, 200)
    changes, before = 0, simulation.controller.lengths
    for _ in range(40):
        simulation.run(Load(8, 500, 2.0), 0, 5)
        changes += simulation.controller.lengths != before
        before = simulation.controller.lengths
    assert changes < 20


def test_cheap_rows_are_verified_and_dear_ones_cut():
    """exllamav3#379: cutting the tail lost where verifying rows is cheap; vllm#43522: it wins where they are dear."""
    cheap = simulator(CHEAP).run(Load(4, 500, 2.5))
    rows_are_dear = CycleCost(ForwardCost({1: 20e-3, 4: 22e-3, 64: 140e-3}), ForwardCost({8: 1e-3}), block=8)
    dear = simulator(rows_are_dear).run(Load(4, 500, 2.5))
    assert cheap.mean_drafts > 5 and 0.5 < dear.mean_drafts < 3
    assert cheap.ratio > 0.97 and dear.ratio > 0.97


def test_neighbours_are_measured():
    """The cost of 192 rows lies far below a line from 64 to 256: only who tries two drafts knows that they are best."""
    knee = CycleCost(ForwardCost({1: 20e-3, 192: 30e-3, 256: 60e-3}), ForwardCost({8: 1e-3}), block=8)
    simulation = simulator(knee)
    simulation.controller.lengths = (3,) * 5
    outcome = simulation.run(Load(64, 500, 5.0))
    assert outcome.drafts == 2 and outcome.ratio > 0.97


def test_accepted_drafts_pay_for_probes():
    """A probe takes four steps' time and every draft of it is accepted: what was put by does not shrink much."""
    simulation = simulator(CycleCost(ForwardCost({1: 20e-3}), ForwardCost({8: 90e-3}), block=8))
    assert simulation.run(Load(1, 500, 8.0), 200, 100).mean_drafts > 6


@pytest.mark.parametrize("slower", [2.0, 0.6])
def test_a_machine_of_another_pace_changes_no_choice(slower):
    """Plain decoding was measured at the old pace, and is not taken for faster, or slower, than drafts are now."""
    simulation = simulator(CHEAP)
    simulation.run(Load(4, 500, 2.5), 0, 300)
    simulation.pace = math.log(slower)
    outcome = simulation.run(Load(4, 500, 2.5), 0, 200)
    assert outcome.ratio > 0.97, outcome
    simulation = simulator(DEAR)
    simulation.run(Load(8, 500, 2.0), 0, 300)
    simulation.pace = math.log(slower)
    assert simulation.run(Load(8, 500, 2.0), 0, 200).ratio > 0.97


def test_lengths_that_are_nobodys_are_none():
    """Lengths were left only for a level at which no request stands: none was drafted for, and no probe sent either."""
    simulation = simulator(CHEAP)
    simulation.run(Load(4, 500, 1.0), 0, 100)
    controller = simulation.controller
    controller.lengths = (0, 0, 0, 0, 7)
    controller._decided = -1000
    outcome = simulation.run(Load(4, 500, 6.0))
    assert outcome.ratio > 0.97 and outcome.mean_drafts > 5


def test_a_search_costs_no_more_than_is_put_by_for_it():
    """Texts that change all the time and never pay: what is tried for the sake of the next one is bounded."""
    simulation = simulator(DEAR)
    plain = got = seconds = 0.0
    for _ in range(12):
        outcome = simulation.run(Load(8, 500, 1.5), 0, 60)
        got, seconds = got + 1 / outcome.controller, seconds + 1
        plain = outcome.plain
    assert seconds / got > 0.94 * plain


@pytest.mark.parametrize("requests", [1, 4, 16, 32])
def test_costs_stay_true_while_waves_of_requests_come_and_go(requests):
    """A wave's steps grow dearer with its context, and the next one begins cheap: no reason to think that the machine
    is slower for good, nor that drafts, measured long ago, are dearer or cheaper than they were."""

    def target(rows: int, context: int) -> float:
        return 12e-3 + 0.6e-3 * rows + 2.2e-6 * context

    def draft(drafting: int) -> float:
        return 3e-3 + 1e-3 * drafting if drafting else 0.0

    controller = BlockLength(7)
    for wave in range(40):
        names, drafts = [f"{wave}-{i}" for i in range(requests)], [0] * requests
        for step in range(128):
            context = requests * (30 + step)
            controller.verified(names, drafts, [0] * requests)
            rows = requests + sum(drafts)
            drafts = controller.plan(names, context)
            drafting = sum(map(bool, drafts))
            seconds = target(rows, context) + draft(drafting)
            controller.observe(Step(seconds, rows, requests, context, draft(drafting), 8 * drafting, drafting))
    each, cost = context / requests, controller.costs.draft
    known = [n for n in range(1, 1 + requests) if cost.samples(8 * n, n, each * n)]
    assert known
    for n in known:
        assert cost.seconds(8 * n, n, each * n) * controller.costs.pace.value == pytest.approx(draft(n), rel=0.2), n


def test_bad_luck_does_not_end_probing():
    """Drafts that take five plain steps and pay by 9 %: a block of which nothing is accepted was worth its try."""
    dear = CycleCost(ForwardCost({1: 15e-3, 16: 15.2e-3}), ForwardCost({16: 79e-3}), block=16)
    for seed in range(6):
        simulation = Simulator(dear, 15, seed)
        simulation.run(Load(1, 500, 1.0), 0, 300)
        assert simulation.run(Load(1, 500, 7.0)).ratio > 0.97, seed


def test_new_weights_are_found_out_soon():
    """A trainer's drafter that was poor and is good now, under requests that go on."""

    def steps_until_drafting(renewed: bool) -> int:
        simulation = simulator(DEAR, seed=1)
        simulation.run(Load(8, 500, 1.0), 0, 2000)
        if renewed:
            simulation.controller.renewed()
        better = Load(8, 500, 6.0)
        for step in range(2000):
            simulation._step(better, [f"r{i}" for i in range(8)], better.acceptance(7))
            if all(simulation.controller.lengths):
                return step
        return 2000

    assert steps_until_drafting(renewed=True) < 10 < 100 < steps_until_drafting(renewed=False)


@pytest.mark.parametrize(("batch", "draftable"), [(16, 16), (16, 15), (16, 8), (4, 1), (16, 1), (32, 24)])
def test_requests_without_drafts_do_not_keep_their_neighbours_from_them(batch, draftable):
    """Drafts that cost next to nothing and are all accepted, for those that did not opt out and are within range."""
    controller, names = BlockLength(7), [f"r{i}" for i in range(draftable)]
    drafts, drafted = [0] * draftable, 0
    for _ in range(600):
        controller.verified(names, drafts, drafts)
        rows, drafts = batch + sum(drafts), controller.plan(names, 500.0 * batch, batch)
        drafting = sum(map(bool, drafts))
        draft = 0.001 * bool(drafting)
        controller.observe(
            Step(0.020 + 0.0001 * rows + draft, rows, batch, 500.0 * batch, draft, drafting * 8, drafting)
        )
        drafted += drafting > 0
    assert drafted > 550


def test_what_a_request_costs_alone_is_not_what_it_costs_beside_others():
    """One request whose drafts pay alone, then beside fifteen that have none: there they cost more than they bring."""
    controller, chance = BlockLength(7), random.Random(1)

    def over_plain(batch: int, steps: int = 1000) -> float:
        drafts, tokens, seconds = [0], 0.0, 0.0
        for _ in range(steps):
            accepted = 0
            while accepted < drafts[0] and chance.random() < 0.75:
                accepted += 1
            controller.verified(["r"], drafts, [accepted])
            rows, drafts = batch + drafts[0], controller.plan(["r"], 500.0 * batch, batch)
            draft = 0.006 if drafts[0] else 0.0
            step = 0.014 + 0.0011 * rows + draft
            tokens, seconds = tokens + batch + accepted, seconds + step
            controller.observe(Step(step, rows, batch, 500.0 * batch, draft, 8 * bool(drafts[0]), int(drafts[0] > 0)))
        return tokens / seconds * (0.014 + 0.0011 * batch) / batch

    assert over_plain(1) > 1.1
    assert over_plain(16) > 0.97


def test_a_load_that_is_never_decoded_without_prompts_is_not_waited_for():
    """A busy server, where some prompt is always being read: such steps are not measured."""
    controller, names = BlockLength(7), [f"r{i}" for i in range(4)]
    for _ in range(50):
        controller.plan(["alone"], 500.0)
        controller.observe(Step(0.0201, 1, 1, 500.0))
    drafts, drafted = [0] * 4, 0
    for _ in range(400):
        controller.verified(names, drafts, drafts)
        drafts = controller.plan(names, 2000.0)
        drafted += any(drafts)
    assert drafted > 250
