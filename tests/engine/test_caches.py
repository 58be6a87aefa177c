# SPDX-License-Identifier: Apache-2.0
"""Draft KV where the scheduler shares, drops and restores it: every draft stays the reference's.

An exact output alone would not show a hole in the draft's context: only acceptance would fall.
"""

import pytest

from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.support.checkpoints import DrafterShape

pytestmark = pytest.mark.engine

BOTH = pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
SLIDING = ("sliding_attention", "sliding_attention")
WINDOWS = {
    "full": {},
    "sliding": {"layer_types": SLIDING, "sliding_window": 40, "is_causal": False},
    "mixed": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 40},
}


def greedy(max_tokens: int) -> dict:
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}


@BOTH
@pytest.mark.parametrize("windows", WINDOWS)
def test_reused_prefixes(serving, make, architecture, windows):
    """vllm#47930, vllm#42971, vllm#43733, vllm#50457: prompts that share blocks, with each other and in a second turn.

    Windowed drafters with prefix caching crashed; shared blocks were overwritten by another request's first draft.
    """
    shape = DrafterShape(architecture=architecture, **WINDOWS[windows])
    pair = make(shape)
    engine = serving.process(shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7})
    # Kinds of prompt share a preamble; these lengths end before, at and behind the edge of a block of 32.
    prompts = [prompt[:length] for prompt, length in zip(tiny_prompts(128)[::4], (95, 96, 97, 120, 150), strict=False)]
    first = engine.generate(prompts, greedy(12))
    check_drafts(pair, first, engine.traces(), 7)
    before = engine.counters()["prefix_cache_hits"]
    turns = [output.prompt_token_ids + output.token_ids + prompts[0][:9] for output in first] + prompts
    second = engine.generate(turns, greedy(12))
    assert engine.counters()["prefix_cache_hits"] - before >= 32 * len(turns)
    assert check_drafts(pair, second, engine.traces(), 7) >= 5 * len(turns)


@pytest.mark.parametrize("windows", WINDOWS)
def test_prefix_hits_are_those_of_plain_decoding(serving, make, windows):
    """dflash#165, vllm#54094, vllm#57032, vllm#53477: the last cached block of a prefix was dropped, and with it all.

    The second time a prompt comes it is drafted for as the first time, so that acceptance is the same too.
    """
    shape = DrafterShape(architecture="dflash2", **WINDOWS[windows])
    pair = make(shape)
    engine = serving.process(shape)
    prompts = [prompt[:length] for prompt, length in zip(tiny_prompts(128)[::4], (64, 65, 96, 120, 150), strict=False)]
    hits = {}
    for name, drafter in (("plain", None), ("drafting", pair.drafter)):
        engine.start(pair.target, drafter, speculative={"num_speculative_tokens": 7} if drafter else {})
        # One at a time: what runs side by side shares by chance.
        first, again = ([engine.generate([prompt], greedy(16))[0] for prompt in prompts] for _ in range(2))
        hits[name] = [output.cached_tokens for output in first + again]
        if drafter:
            traces = engine.traces()
            steps = [[(step.drafts, step.accepted) for step in traces[output.request_id].steps] for output in first]
            assert steps == [
                [(step.drafts, step.accepted) for step in traces[output.request_id].steps] for output in again
            ]
            check_drafts(pair, again, traces, 7)
    count = len(prompts)
    assert hits["drafting"][count:] == hits["plain"][count:]
    assert min(hits["plain"][count:]) >= 32
    if windows == "full":
        assert hits["drafting"] == hits["plain"]
    else:
        # Where a prompt only begins like another, the window's own group of blocks may match one block less.
        assert all(0 <= more - fewer <= 32 for more, fewer in zip(hits["plain"], hits["drafting"], strict=True))


@BOTH
def test_preempted_requests(serving, trained, architecture):
    """Preempted requests give up their blocks and prefill again, drafted-for tokens included."""
    pair = trained(architecture)
    engine = serving.process(pair.drafter_shape)
    engine.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": 7},
        num_gpu_blocks_override=24,
        max_num_batched_tokens=384,
    )
    prompts = [prompt[-90:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:12]]
    outputs = engine.generate(prompts, greedy(64))
    traces = engine.traces()
    assert sum(trace.preemptions for trace in traces.values()) >= 2
    assert check_drafts(pair, outputs, traces, 7) >= 12 * 12


@BOTH
def test_sequences_longer_than_the_drafts_positions(serving, make, architecture):
    """vllm#57941, vllm#57964: the engine died at the first request beyond the draft's max_position_embeddings.

    Short requests speculate up to the draft's range, beside long ones that go on without drafts and rows for them.
    """
    serving.needs_plugin("a draft range below the target's")
    shape = DrafterShape(architecture=architecture, max_positions=64)
    pair = make(shape)
    engine = serving.process(shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7})
    texts = tiny_prompts(128)
    prompts = [texts[0][:300], texts[1][:20], texts[2][:61], texts[3][:64], texts[4][:8]]
    outputs = engine.generate(prompts, greedy(60))
    traces = engine.traces()
    check_drafts(pair, outputs, traces, 7, limit=64)
    drafted = [sum(len(step.drafts) for step in traces[output.request_id].steps) for output in outputs]
    assert drafted[0] == drafted[3] == 0
    assert min(drafted[1], drafted[4]) > 100
    rows = [len(traces[output.request_id].stand_ins) for output in outputs]
    assert max(rows[0], rows[3]) <= serving.late
