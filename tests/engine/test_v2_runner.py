# SPDX-License-Identifier: Apache-2.0
"""The V2 runner, under Triton's interpreter: exact, lossless, the drafts of V1 and of the reference, and no dense q.

Small, since the interpreter takes a tenth of a second a token; `make test-v2` runs the other suites on V2 too.
"""

import pytest
import torch

from tests.engine import probes
from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.engine.test_block_length import check
from tests.support.distribution import compare, exact_distribution

pytestmark = pytest.mark.engine
BOTH = pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
PROMPT = [3, 28, 23, 9, 27, 4, 20, 11]


@pytest.fixture(scope="module")
def v2(processes, plugin):
    if not plugin:
        pytest.skip("the plug-in on V2")
    return processes(runner="v2", plugin=True)


@BOTH
def test_sixteen_prompts_are_exact_and_drafted_as_on_v1(v2, processes, trained, architecture):
    """fp32, T=0, prompts cut in chunks, requests that come and go: the target's tokens, the reference's drafts."""
    pair = trained(architecture)
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=70)[:16]
    sampling = [{"temperature": 0, "max_tokens": 10 + index, "ignore_eos": True} for index in range(16)]
    steps = []
    for engine in (v2, processes(runner="v1", plugin=True)):
        engine.start(
            pair.target,
            pair.drafter,
            speculative={"num_speculative_tokens": 7},
            max_num_seqs=10,
            max_num_batched_tokens=200,
        )
        outputs = engine.generate(prompts, sampling)
        traces = engine.traces()
        steps.append([kept_steps(output, traces[output.request_id]) for output in outputs])
        if engine is v2:
            assert check_drafts(pair, outputs, traces, 7) >= 16 * 4
            assert any(trace.unfinished_chunks for trace in traces.values())
            assert max(step.accepted for trace in traces.values() for step in trace.verified) >= 2
    assert steps[0] == steps[1]


def kept_steps(output, trace) -> list[tuple]:
    """Where each draft began, what it was and how much of it was accepted; the last may reach beyond the last token."""
    end = len(output.prompt_token_ids) + len(output.token_ids) - 1
    return [(s.anchor_position, s.drafts, s.accepted) for s in trace.verified if s.anchor_position < end]


def test_more_draft_rows_than_a_step_has_tokens(v2, trained):
    """vllm#53970: eight requests end their prompts in one step of 40 tokens, and 64 rows draft behind them."""
    pair = trained("dflash2")
    prompts = [prompt[:5] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:8]]
    v2.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": 7},
        max_num_seqs=8,
        max_num_batched_tokens=40,
        max_model_len=64,
    )
    outputs = v2.generate(prompts, {"temperature": 0, "max_tokens": 10, "ignore_eos": True})
    assert check_drafts(pair, outputs, v2.traces(), 7) >= 8 * 3


def worst(v2, joint, count: int) -> float:
    """The least p-value of `count` sampled requests; also sees to it that drafts were accepted."""
    sampling = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
    outputs = v2.generate([PROMPT] * count, [sampling | {"seed": index} for index in range(count)])
    accepted = [step.accepted for trace in v2.traces().values() for step in trace.verified]
    assert sum(accepted) > 0.2 * len(accepted), "hardly a draft was accepted; the test would show little"
    results = compare(torch.tensor([output.token_ids for output in outputs]), joint)
    print(f"mean accepted {sum(accepted) / len(accepted):.2f};", results)
    return min(chance for _, chance in results.values())


@pytest.mark.parametrize(("architecture", "requests"), [("dflash2", 600)])
def test_sampled_tokens_are_the_targets(v2, trained, architecture, requests):
    """T=1: the first three tokens by chi-square. What is held for q is its candidates, and no dense tensor."""
    pair = trained(architecture)
    v2.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": 3},
        max_num_seqs=200,
        max_num_batched_tokens=2048,
    )
    joint = exact_distribution(pair.target, PROMPT, 3)

    assert worst(v2, joint, requests) > 1e-3
    held = v2.probe(probes.held_for_q)
    assert held["dense"] == []
    assert held["bytes"] == (200 + 1) * 3 * pair.drafter_shape.selector_top_k * 8

    # A seeded request's tokens are its own, whoever drafts beside it when its first token is sampled.
    seeded = {"temperature": 1.0, "seed": 11, "max_tokens": 6, "ignore_eos": True}
    [alone] = v2.generate([PROMPT], seeded)
    others = tiny_prompts(pair.target_shape.vocab_size, longest=40)[:3]
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    assert v2.probe(probes.beside_others, others, greedy, PROMPT, seeded) == alone.token_ids

    # A request's own number of drafts: fewer rows are scheduled for it, and its tokens stay the same.
    v2.traces()
    outputs = v2.generate(
        [others[0]] * 3, [greedy, *(greedy | {"extra_args": {"dflash": {"max_draft_tokens": most}}} for most in (1, 0))]
    )
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    traces = v2.traces()
    scheduled = [{step.scheduled for step in traces[output.request_id].verified} for output in outputs]
    assert 3 in scheduled[0] and scheduled[1] == {1} and scheduled[2] == set()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_block_verification_is_lossless(v2, trained, architecture):
    """Stock's own method: its kernels get the sparse q spread out."""
    pair = trained(architecture)
    speculative = {"num_speculative_tokens": 3, "rejection_sample_method": "block"}
    v2.start(pair.target, pair.drafter, speculative=speculative, max_num_seqs=200, max_num_batched_tokens=2048)
    assert worst(v2, exact_distribution(pair.target, PROMPT, 3), 600) > 1e-3


@pytest.mark.slow
def test_synthetic_acceptance_is_what_was_asked_for(v2, trained):
    pair = trained("dflash2")
    speculative = {
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 0.0],
    }
    v2.start(pair.target, pair.drafter, speculative=speculative)
    v2.generate([PROMPT] * 4, {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True})
    accepted = [step.accepted for trace in v2.traces().values() for step in trace.verified if step.scheduled == 3]
    assert set(accepted[:-1]) == {2}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_adaptive_verification_is_told_how_likely_each_draft_is(v2, trained, temperature):
    """Stock's estimator gets the candidates' scores: from them a chance by its first coefficients, a draft."""
    pair = trained("dflash2")
    v2.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 3})
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=30)[:3]
    sampling = {"temperature": temperature, "max_tokens": 8, "ignore_eos": True, "seed": 5}
    steps = v2.probe(probes.estimated_acceptance, prompts, sampling)
    assert len(steps) >= 3
    for scores, chances in steps:
        odds = torch.logit(scores.softmax(-1).amax(-1)).clamp(-40, 40)
        torch.testing.assert_close(chances, torch.sigmoid(0.5 * odds - 0.2), atol=2e-3, rtol=0)
    assert max(float(chances.max()) for _, chances in steps) > 0.5


def test_the_controllers_lengths(v2, trained):
    """Lengths that the controller finds by a clock of the test, 0 first: no forward then, and the context is whole."""
    pair = trained("dflash2")
    v2.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": 7},
        additional_config={"dflash": {"block_length": "auto"}},
    )
    v2.probe(probes.tick)
    v2.probe(probes.count_forwards)
    greedy = {"temperature": 0, "max_tokens": 90, "ignore_eos": True}
    outputs = v2.generate(tiny_prompts(pair.target_shape.vocab_size, longest=40)[:2], greedy)
    lengths = check(pair, outputs, v2.traces(), 7)
    steps = v2.probe(probes.forward_counts)
    forwards = [max(step["drafter"]) for step in steps]
    print(lengths, forwards)
    assert forwards[:3] == [0, 0, 0] and lengths.count(0) > 3 and max(lengths) > 3
    assert 10 < sum(forwards) < len(forwards) - 3


@pytest.mark.slow
@BOTH
def test_asynchronous_scheduling(processes, plugin, trained, architecture):
    """As on a GPU, where the next step is planned before this one's drafts are known. Grammar and own numbers too."""
    if not plugin:
        pytest.skip("the plug-in on V2")
    engine = processes(runner="v2", plugin=True, environment=(("V2_ON_CPU_ASYNCHRONOUS", "1"),))
    pair = trained(architecture)
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    allowed = greedy | {"structured_outputs": {"regex": "(t3|t28|t23|t9|t27|t4|t0)+"}}
    sampling = [greedy] * 4 + [allowed, greedy | {"extra_args": {"dflash": {"max_draft_tokens": 2}}}]
    # Nothing is traced: the scheduler learns of no draft.
    asynchronous = {"async_scheduling": True, "traced": False}
    engine.start(pair.target, **asynchronous)
    plain = [output.token_ids for output in engine.generate(prompts, [*sampling[:5], greedy])]
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **asynchronous)
    assert engine.probe(probes.is_asynchronous)
    assert [output.token_ids for output in engine.generate(prompts, sampling)] == plain
    assert engine.counters()["spec_decode_num_accepted_tokens"] > 0

    # Lengths that change from step to step and from request to request, 0 for everyone among them.
    auto = {"additional_config": {"dflash": {"block_length": "auto"}}}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **asynchronous, **auto)
    engine.probe(probes.script_lengths, [0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 2, 5])
    engine.probe(probes.count_forwards)
    assert [output.token_ids for output in engine.generate(prompts, sampling)] == plain
    counts = engine.counters()
    assert counts["spec_decode_num_accepted_tokens"] > 0
    assert counts["spec_decode_num_draft_tokens"] < 7 * counts["spec_decode_num_drafts"]
    assert {max(step["drafter"]) for step in engine.probe(probes.forward_counts)} == {0, 1}
