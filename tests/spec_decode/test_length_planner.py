# SPDX-License-Identifier: Apache-2.0
"""The planner under a clock of its own: what a step took, and whose stages it was."""

from types import SimpleNamespace

import pytest

from vllm_dflash.spec_decode.length_planner import LengthPlanner
from vllm_dflash.spec_decode.outcome import StepOutcome
from vllm_dflash.spec_decode.timing import StageClock


class Engine:
    """Steps of one request, on a clock that only the stages move."""

    def __init__(self, length="auto", **options):
        self.time = 0.0
        clock = StageClock(now=lambda: self.time)
        self.worker = SimpleNamespace(clock=clock, drafts=3, observers=[], timing_observers=[])
        self.planner = LengthPlanner(self.worker, length, now=lambda: self.time, **options)
        self.drafts = [0]

    def step(self, target: float, draft: float = 0.0, other: float = 0.0, decoding: bool = True) -> list[int]:
        clock = self.worker.clock
        clock.begin_step(1, 500)
        with clock.stage("target", rows=1 + self.drafts[0]):
            self.time += target
        for observer in self.worker.observers:
            observer(StepOutcome(["a"], self.drafts, self.drafts))
        self.planner.begin(1 + self.drafts[0], decoding)
        self.drafts = self.planner.plan(["a"], 500)
        if any(self.drafts):
            for stage in ("draft", "select"):
                with clock.stage(stage, rows=4):
                    self.time += draft / 2
        self.time += other
        timings = clock.take()
        for observer in self.worker.timing_observers:
            observer(timings)
        return self.drafts


def test_a_step_lasts_from_end_to_end():
    engine = Engine()
    for _ in range(5):
        engine.step(0.01, other=0.002)
    cost = engine.planner.controller.costs.target
    assert cost.seconds(1, 1, 500) == pytest.approx(0.012)
    assert cost.samples(1, 1, 500) == 3, "the first step has no beginning, and the last one drafts"


def test_the_drafts_share_is_its_own():
    engine = Engine()
    drafted = sum(engine.step(0.01, draft=0.004, other=0.001) != [0] for _ in range(200))
    controller = engine.planner.controller
    assert drafted > 100, "all drafts are accepted and cheap"
    assert controller.costs.draft.seconds(4, 1, 500) == pytest.approx(0.004)
    assert controller.costs.target.seconds(4, 1, 500) == pytest.approx(0.011)


def test_prompts_say_nothing_about_the_cost_of_decoding():
    engine = Engine()
    for index in range(20):
        engine.step(0.5 if index % 2 else 0.01, decoding=index % 2 == 0)
    assert engine.planner.controller.costs.target.seconds(1, 1, 500) == pytest.approx(0.01)


def test_a_fixed_length_listens_to_nothing():
    engine = Engine(2)
    assert [engine.step(0.01) for _ in range(3)] == [[2]] * 3
    assert not engine.worker.observers and not engine.planner.controller.costs.target.samples(1, 1, 500)


def test_ranks_agree():
    """A rank that measures other times drafts what the first rank drafts."""
    engine = Engine(agree=lambda lengths: [3 for _ in lengths])
    assert engine.step(0.01) == [3]


def test_a_block_is_judged_by_its_own_q_however_late_its_outcome():
    """A device tells what became of a block when the next one is drawn, and with ranks in step the one after that."""
    for late in range(4):
        engine = Engine()
        clock, planner = engine.worker.clock, engine.planner
        heard: list[StepOutcome] = []
        kept: list[int] = []
        for mode in (0.95, 0.15, 0.15, 0.15, 0.15, 0.15, 0.15):
            clock.begin_step(1, 500)
            if clock.step > 1:
                heard.append(StepOutcome(["a"], kept, kept, step=clock.step))
            if len(heard) > late:
                planner._verified(heard.pop(0))
            kept = planner.cut(["a"], [3], [[mode] * 3])
            if clock.step - late >= 2:
                rates = planner.controller.confidence.rates([0.95])
                assert rates[0] > 0.95, "what was surely accepted is not what q was sure of"
