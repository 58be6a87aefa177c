# SPDX-License-Identifier: Apache-2.0
"""Drafts of a length that changes from step to step: the same tokens, whatever is drafted and however often."""

import pytest
import torch

from tests.engine import probes
from tests.engine.prompts import tiny_prompts
from tests.engine.test_distribution import LOSSLESS, PROMPT
from tests.reference.dflash import read_drafter
from tests.reference.speculate import context_of, drafts_at
from tests.reference.target import ReferenceTarget
from tests.support.distribution import compare, exact_distribution

pytestmark = pytest.mark.engine

BOTH = pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def start(serving, trained):
    def start(architecture: str, length, drafts: int = 7, **arguments):
        serving.needs_plugin("block_length")
        pair = trained(architecture)
        engine = serving.process(pair.drafter_shape)
        engine.start(
            pair.target,
            pair.drafter,
            speculative={"num_speculative_tokens": drafts},
            additional_config={"dflash": {"block_length": length}},
            **arguments,
        )
        return engine, pair

    return start


def check(pair, outputs, traces, most: int) -> list[int]:
    """Every token is the target's argmax and every draft the reference's; -> the drafts' lengths."""
    target = ReferenceTarget(pair.target)
    drafter = read_drafter(pair.drafter, target)
    lengths = []
    for output in outputs:
        token_ids = output.prompt_token_ids + output.token_ids
        judged = target.run(token_ids)[0].argmax(-1).tolist()
        assert output.token_ids == judged[len(output.prompt_token_ids) - 1 : -1], "not the target's greedy tokens"
        context = context_of(target, drafter, token_ids)
        for step in traces[output.request_id].steps:
            if step.anchor_position < len(token_ids):
                expected = drafts_at(context, drafter, token_ids, step.anchor_position, most).token_ids
                assert step.drafts == expected[: len(step.drafts)], f"{output.request_id} at {step.anchor_position}"
                lengths.append(len(step.drafts))
    return lengths


@pytest.mark.parametrize("length", [0, 3, "auto"])
def test_tokens_are_the_targets_and_drafts_the_references(start, length):
    engine, pair = start("dflash2", length)
    engine.probe(probes.count_forwards)
    outputs = engine.generate(tiny_prompts(pair.target_shape.vocab_size)[:6], GREEDY)
    traces = engine.traces()
    steps = engine.probe(probes.forward_counts)
    lengths = check(pair, outputs, traces, 7)
    runs = {count for step in steps for count in step["drafter"]}
    if length == 0:
        assert runs == {0} and not any(lengths)
    elif length == 3:
        assert runs <= {0, 1} and max(lengths) == 3


@BOTH
def test_no_hole_after_steps_without_drafts(start, architecture):
    """vllm#49164: at K=0 no draft forward runs, and the context is written all the same.

    Drafts after such a stretch, and after one cut short, are the reference's.
    """
    engine, pair = start(architecture, "auto")
    pattern = [0, 0, 0, 0, 0, 7, 0, 2, 7, 1, 0, 0]
    engine.probe(probes.script_lengths, pattern)
    engine.probe(probes.count_forwards)
    outputs = engine.generate(tiny_prompts(pair.target_shape.vocab_size)[:1], [GREEDY])
    traces = engine.traces()
    lengths = check(pair, outputs, traces, 7)
    assert set(lengths) >= {1, 2, 7}, lengths
    for step in engine.probe(probes.forward_counts):
        assert set(step["drafter"]) <= {0, 1}
    # The stretches of a whole batch differ from request to request.
    outputs = engine.generate(tiny_prompts(pair.target_shape.vocab_size)[:9], GREEDY)
    assert {1, 2, 7} <= set(check(pair, outputs, engine.traces(), 7))


def test_skipped_forwards_are_skipped(start):
    """vllm#49164: as many draft forwards as there are steps with drafts."""
    engine, pair = start("dflash2", "auto")
    engine.probe(probes.script_lengths, [0, 0, 0, 5])
    engine.probe(probes.count_forwards)
    engine.generate(tiny_prompts(pair.target_shape.vocab_size)[:1], [GREEDY])
    runs = [max(step["drafter"]) for step in engine.probe(probes.forward_counts)]
    # V2 plans the first step's drafts before its worker has said anything.
    first = runs.index(1)
    assert first in (3, 4) and runs[first : first + 8] == [1, 0, 0, 0] * 2


def test_sampled_tokens_are_the_targets(start, trained):
    """vllm#43522, vllm#51303: lengths that change with request and step leave the distribution as it is."""
    engine, pair = start("dflash2", "auto", drafts=3, max_num_seqs=128, max_num_batched_tokens=4096)
    engine.probe(probes.script_lengths, [0, 3, 1, 2, 3])
    count = 3000
    sampling = [
        {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "seed": index, "detokenize": False}
        for index in range(count)
    ]
    outputs = engine.generate([PROMPT] * count, sampling)
    results = compare(
        torch.tensor([output.token_ids for output in outputs]), exact_distribution(pair.target, PROMPT, 3)
    )
    lengths = {len(step.drafts) for trace in engine.traces().values() for step in trace.verified}
    assert lengths >= {1, 2}
    assert min(chance for _, chance in results.values()) > LOSSLESS, results


def test_a_length_beyond_the_drafters_is_refused(start):
    with pytest.raises(Exception, match=r'block_length is 9, but the drafter drafts 7 tokens a step\. Give 0 to 7'):
        start("dflash2", 9)


def test_requests_that_opt_out_do_not_keep_another_from_drafts(start):
    """Three beside it have none: it is tried all the same, and its batch is of four."""
    engine, pair = start("dflash2", "auto")
    out = {"extra_args": {"dflash": {"max_draft_tokens": 0}}}
    sampling = [GREEDY | {"max_tokens": 200} | ({} if row == 1 else out) for row in range(4)]
    outputs = engine.generate(tiny_prompts(pair.target_shape.vocab_size)[:4], sampling)
    traces = engine.traces()
    blocks = [len(traces[output.request_id].verified) for output in outputs]
    assert blocks[1] >= 1 and not any(blocks[:1] + blocks[2:]), blocks
    check(pair, outputs[1:2], traces, 7)
