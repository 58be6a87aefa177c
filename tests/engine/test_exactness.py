# SPDX-License-Identifier: Apache-2.0
"""fp32, T=0: the same token ids as plain decoding, whatever the scheduler does. Forty prompts of four kinds.

All are submitted together, with prefix caching and chunked prefill on, and with a KV cache so small that requests
are preempted; each of the three is asserted to have happened.
"""

import pytest

from tests.engine.prompts import prompts, tiny_prompts
from tests.reference.target import ReferenceTarget

pytestmark = pytest.mark.engine

BOTH = pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
MAX_TOKENS = 128
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
# Prompts, tokens each, and blocks of a cache that is too small for them; the interpreter under V2 is slow.
TINY = {"v1": (40, 128, 90), "v2": (16, 40, 44)}


@pytest.fixture(scope="module")
def plain():
    """Plain decoding with room for all, once a target: both architectures are compared with the same tokens."""
    known: dict = {}

    def decode(engine, target, texts, blocks: int, sampling=GREEDY, **arguments) -> list[list[int]]:
        if target not in known:
            engine.start(target, num_gpu_blocks_override=blocks, **arguments)
            known[target] = [output.token_ids for output in engine.generate(texts, sampling)]
            assert engine.counters()["num_preemptions"] == 0
            assert all(len(token_ids) == sampling["max_tokens"] for token_ids in known[target])
        return known[target]

    return decode


def check_exact(
    engine, pair, texts, expected, tight_blocks: int, num_drafts: int, most_accepted: int = 3, sampling=GREEDY,
    **arguments,
) -> None:
    """Speculation gives the expected tokens in a KV cache that is really too small.

    most_accepted: drafts that some step must at least accept, else the test would show little.
    """
    engine.start(
        pair.target,
        pair.drafter,
        num_gpu_blocks_override=tight_blocks,
        speculative={"num_speculative_tokens": num_drafts},
        **arguments,
    )
    speculative = engine.generate(texts, sampling)
    counters, traces = engine.counters(), engine.traces()
    differing = [
        index
        for index, (token_ids, output) in enumerate(zip(expected, speculative, strict=True))
        if token_ids != output.token_ids
    ]
    assert not differing, f"requests {differing} of {len(expected)} differ from plain decoding"
    assert counters["num_preemptions"] >= 3
    assert sum(trace.preemptions for trace in traces.values()) == counters["num_preemptions"]
    assert counters["prefix_cache_hits"] > 0
    assert any(trace.unfinished_chunks for trace in traces.values())
    accepted = [step.accepted for trace in traces.values() for step in trace.verified]
    assert 0 in accepted and max(accepted) >= most_accepted, "acceptance must vary, or the test shows little"


@BOTH
def test_tiny_pair(serving, trained, plain, architecture):
    pair = trained(architecture)
    engine = serving.process(pair.drafter_shape)
    count, tokens, blocks = TINY[engine.runner]
    texts = tiny_prompts(pair.target_shape.vocab_size)[:count]
    batch = {"max_num_seqs": count, "max_num_batched_tokens": 16 * count, "sampling": GREEDY | {"max_tokens": tokens}}
    expected = plain(engine, trained("dflash").target, texts, 700, **batch)
    check_exact(engine, pair, texts, expected, tight_blocks=blocks, num_drafts=7, **batch)


@pytest.mark.parametrize("architecture", [pytest.param("dflash", marks=pytest.mark.slow), "dflash2"])
def test_engine_core_in_a_process_of_its_own(serving, trained, architecture):
    """As vLLM starts it by default: the plug-in is loaded in both processes, and the drafter really drafts."""
    pair = trained(architecture)
    engine = serving.process(pair.drafter_shape, in_process=False)
    texts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    target = ReferenceTarget(pair.target)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7})
    outputs = engine.generate(texts, GREEDY | {"max_tokens": 24})
    assert [output.token_ids for output in outputs] == [target.greedy(text, 24) for text in texts]
    counters = engine.counters()
    assert counters["spec_decode_num_draft_tokens"] == 7 * counters["spec_decode_num_drafts"] > 0
    assert counters["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.pair
@BOTH
def test_demo_pair(serving, demo, plain, architecture):
    """The DFlash drafter is the DFlash 2 one without convolution and selector, so it is right less often."""
    pair = demo(architecture)
    engine = serving.process(pair.drafter_shape)
    texts, batch = prompts(), {"max_num_seqs": 40, "max_num_batched_tokens": 640}
    expected = plain(engine, pair.target, texts, 420, **batch)
    # Three drafts for the weaker one: they cost half the rows, and it is rarely right about a fourth.
    check_exact(
        engine,
        pair,
        texts,
        expected,
        tight_blocks=150,
        num_drafts=7 if architecture == "dflash2" else 3,
        most_accepted=3 if architecture == "dflash2" else 2,
        **batch,
    )
