# SPDX-License-Identifier: Apache-2.0
"""A drafter that raises, or computes NaN, in a running engine: plain decoding, and the engine lives.

What no token can be had without, the target's forward and the verification, ends the engine with its own words.
"""

import time

import pytest
import torch

from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.engine.ranks import hear_late
from tests.support.engine import EngineError
from tests.support.engine_process import drafter, model_runner

pytestmark = pytest.mark.engine

K = 7
BLOCK = 32
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
STAGES = {"inject": "combine_hidden_states", "forward": "forward", "candidates": "candidates", "select": "select"}

_kept: dict = {}


def raise_in(llm, method: str, first: int, count: int) -> None:
    """Runs in the engine's process: calls number first, first + 1, ... (count of them) of the method raise."""
    model = drafter(llm).model
    stock, calls = getattr(model, method), [0]

    def raising(*arguments, **options):
        calls[0] += 1
        if first <= calls[0] < first + count:
            raise RuntimeError(f"{method} was told to fail")
        return stock(*arguments, **options)

    setattr(model, method, raising)


def raise_without(llm, stage: str) -> None:
    """From now on the target's forward, which the taps come from, or the verification raises."""

    def raising(*arguments, **options):
        raise RuntimeError(f"the {stage} was told to fail")

    runner = model_runner(llm)
    if stage == "target":
        runner.model.forward = raising
    elif getattr(runner, "speculator", None) is not None:
        runner.rejection_sampler._verify = raising
    else:
        drafter(llm).worker.verify = raising


def restore_methods(llm) -> None:
    model = drafter(llm).model
    for method in STAGES.values():
        vars(model).pop(method, None)


def spoil_weight(llm) -> None:
    weight = drafter(llm).model.model.norm.weight
    _kept["norm"] = weight.data.clone()
    weight.data.fill_(float("nan"))


def mend_weight(llm) -> None:
    drafter(llm).model.model.norm.weight.data.copy_(_kept.pop("norm"))


def spoil_context_of(llm, row: int, calls: int) -> None:
    """In the next `calls` calls that row of the context that is written becomes NaN."""
    model = drafter(llm).model
    stock, left = model.combine_hidden_states, [calls]

    def spoiled(taps: torch.Tensor) -> torch.Tensor:
        features = stock(taps)
        if left[0]:
            left[0] -= 1
            features[row] = float("nan")
        return features

    model.combine_hidden_states = spoiled


def state(llm) -> tuple[dict, bool]:
    tally = drafter(llm).worker.tally
    return dict(tally.faults), tally.enabled


@pytest.fixture(scope="module")
def case(serving, trained):
    serving.needs_plugin("fault handling")
    pair = trained("dflash2")
    prompts = [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:4]]
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target)
    plain = [output.token_ids for output in engine.generate(prompts, GREEDY)]

    def start(prefix_caching: bool = False):
        # Metrics would empty the tally that the tests read.
        options = {"additional_config": {"dflash": {"metrics": False}}, "enable_prefix_caching": prefix_caching}
        engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K}, **options)
        return engine

    return start, pair, prompts, plain


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_is_a_plain_step_and_drafting_goes_on(case, stage):
    start, pair, prompts, plain = case
    engine = start()
    engine.probe(raise_in, STAGES[stage], 4, 2)
    outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == plain
    faults, enabled = engine.probe(state)
    assert faults == {"exception": 2} and enabled
    steps = [step for trace in engine.traces().values() for step in trace.steps]
    assert any(not step.drafts for step in steps)
    # Later requests draft as ever.
    engine.probe(restore_methods)
    outputs = engine.generate(prompts, GREEDY)
    assert check_drafts(pair, outputs, engine.traces(), K) >= len(prompts)


@pytest.mark.parametrize("stage", ["target", "verification"])
def test_without_target_or_verification_the_engine_ends_as_stock_s_does(case, stage):
    start, _, prompts, plain = case
    engine = start()
    engine.probe(raise_without, stage)
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"the {stage} was told to fail"):
        engine.generate(prompts, GREEDY)
    assert time.monotonic() - began < 60
    engine = start()
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == plain


def test_context_that_was_not_written_is_not_attended(serving, case):
    """The first chunk of context fails: what follows drafts from the rest, as the reference does from there.

    Until there is a rest to draft from, no rows are verified.
    """
    start, pair, prompts, plain = case
    engine = start()
    engine.probe(raise_in, STAGES["inject"], 1, 1)
    outputs = engine.generate(prompts[:1], GREEDY)
    assert outputs[0].token_ids == plain[0]
    traces = engine.traces()
    # The prompt's 40 rows, in blocks of 32: drafts begin behind position 64.
    steps = traces[outputs[0].request_id].steps
    assert all(not step.drafts for step in steps if step.anchor_position < 64)
    assert next(step.anchor_position for step in steps if step.drafts) == 64
    assert len(traces[outputs[0].request_id].stand_ins) <= serving.late
    for trace in traces.values():
        trace.steps = [step for step in trace.steps if step.drafts]
    assert check_drafts(pair, outputs, traces, K, starts={outputs[0].request_id: 64}) >= 1


def test_a_hole_in_the_middle_is_not_attended(case):
    """Two steps of decoding write no context: drafts go on from the next block, for who shares the blocks too."""
    start, pair, prompts, plain = case
    engine = start(prefix_caching=True)
    engine.probe(raise_in, STAGES["inject"], 9, 2)
    [output] = engine.generate(prompts[:1], GREEDY | {"max_tokens": 120})
    assert output.token_ids[:32] == plain[0]
    traces = engine.traces()
    steps = traces[output.request_id].steps
    failed = next(index for index, step in enumerate(steps) if not step.drafts)
    after = next(index for index, step in enumerate(steps) if index > failed and step.drafts)
    end = BLOCK * (steps[after].anchor_position // BLOCK)
    assert failed == 8 and steps[failed].anchor_position < end <= steps[failed].anchor_position + 2 * BLOCK
    assert not any(step.drafts for step in steps[failed:after])
    traces[output.request_id].steps = steps[:failed]
    assert check_drafts(pair, [output], traces, K) == 8
    traces[output.request_id].steps = steps[after:]
    assert check_drafts(pair, [output], traces, K, starts={output.request_id: end}) >= 4

    prompt = output.prompt_token_ids + output.token_ids[:-1]
    [sharing] = engine.generate([prompt], GREEDY)
    assert sharing.cached_tokens == len(prompt) // BLOCK * BLOCK and engine.probe(state)[1]
    assert check_drafts(pair, [sharing], engine.traces(), K, starts={sharing.request_id: end}) >= 4


def test_three_failed_steps_switch_speculation_off_loudly(case):
    start, _, prompts, plain = case
    engine = start()
    engine.probe(raise_in, STAGES["forward"], 3, 10**6)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == plain
    assert engine.probe(state) == ({"exception": 3, "disabled": 1}, False)
    assert "speculation is OFF from now on" in engine.printed()
    engine.traces()
    engine.probe(restore_methods)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == plain
    assert not any(step.drafts for trace in engine.traces().values() for step in trace.steps)


def test_non_finite_weights_give_no_drafts_and_switch_off(case):
    """After each failed step a request's context begins anew, at the next block: it takes three blocks in all."""
    start, _, prompts, plain = case
    engine = start()
    engine.probe(spoil_weight)
    outputs = engine.generate(prompts, GREEDY | {"max_tokens": 80})
    assert [output.token_ids[:32] for output in outputs] == plain
    assert engine.probe(state) == ({"non_finite": 3, "disabled": 1}, False)
    assert not any(step.drafts for trace in engine.traces().values() for step in trace.steps)
    engine.probe(mend_weight)


def test_one_requests_non_finite_context_is_left_behind(serving, case):
    """Its neighbours draft on, and so does the request itself once it has context again; till then it has no rows."""
    start, _, prompts, plain = case
    engine = start()
    engine.probe(spoil_context_of, 0, 1)
    outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == plain
    faults, enabled = engine.probe(state)
    assert faults == {"non_finite": 1} and enabled
    traces = engine.traces()
    first, *others = (traces[output.request_id].steps for output in outputs)
    assert not first[0].drafts and any(step.drafts for step in first)
    assert sum(not step.drafts for step in first) >= 20
    assert len(traces[outputs[0].request_id].stand_ins) <= serving.late
    assert all(step.drafts for steps in others for step in steps)


def test_a_context_that_is_heard_of_late_is_one_fault(case):
    """A device is behind the host: two more steps draft from NaN before it is known, and say nothing new then."""
    start, _, prompts, plain = case
    engine = start()
    engine.probe(hear_late_by, 2)
    engine.probe(spoil_context_of, 0, 1)
    [output] = engine.generate(prompts[:1], GREEDY | {"max_tokens": 70})
    assert output.token_ids[:32] == plain[0]
    assert engine.probe(state) == ({"non_finite": 1}, True)
    drafted = [bool(step.drafts) for step in engine.traces()[output.request_id].steps]
    assert drafted[:3] == [False] * 3 and any(drafted)


def hear_late_by(llm, steps: int) -> None:
    hear_late(drafter(llm).worker._readback, steps)
