# SPDX-License-Identifier: Apache-2.0
"""Options of one request: mixed with others in one batch (vllm#55412), refused where bad (over HTTP: tests/server)."""

import pytest
from vllm import SamplingParams

from tests.engine import probes
from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.support.engine import EngineError
from vllm_dflash.engine.requests import RequestTable

pytestmark = pytest.mark.engine

K = 7
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 40, "ignore_eos": True}
CAPS = [None, 0, 3, 1, K, 100, 0, 2]


def capped(sampling: dict, cap: int | None) -> dict:
    return sampling if cap is None else sampling | {"extra_args": {"dflash": {"max_draft_tokens": cap}}}


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_a_mixed_batch_keeps_its_tokens_and_each_request_its_cap(serving, trained, architecture):
    """vllm#55412: speculation off, or shorter, for some requests of a batch, greedy ones exact."""
    pair = trained(architecture)
    prompts = [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[: len(CAPS)]]
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target)
    plain = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K})
    outputs = engine.generate(prompts, [capped(GREEDY, cap) for cap in CAPS])
    traces = engine.traces()
    assert [output.token_ids for output in outputs] == plain
    for output, cap in zip(outputs, CAPS, strict=True):
        # On V2 a block is always whole, and the cap holds for what is verified of it.
        longest = max((step.scheduled for step in traces[output.request_id].verified), default=0)
        assert longest == min(K, K if cap is None else cap)
    steps = {cap: len(traces[output.request_id].steps) for output, cap in zip(outputs, CAPS, strict=True)}
    assert steps[0] == 39 and steps[None] < 30


def test_where_nobody_wants_drafts_none_are_computed_and_context_is_still_written(serving, trained):
    """vllm#49164: no draft forward at all, and the next request on the same prefix drafts from all of its context."""
    pair = trained("dflash2")
    prompts = [prompt[-80:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:3]]
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K})
    engine.probe(probes.count_forwards)
    off = engine.generate(prompts, capped(GREEDY, 0))
    counts = engine.probe(probes.forward_counts)
    assert sum(step["drafting"] for step in counts) > 100 and not any(any(step["drafter"]) for step in counts)
    engine.traces()
    turns = [output.prompt_token_ids + output.token_ids for output in off]
    outputs = engine.generate(turns, GREEDY)
    assert engine.counters()["prefix_cache_hits"] >= 3 * 96
    assert check_drafts(pair, outputs, engine.traces(), K) > 10


def test_a_request_without_drafts_does_not_change_its_neighbours_at_temperature_1(serving, trained):
    """Seeded requests draw the same tokens whether their neighbours speculate or not."""
    pair = trained("dflash2")
    prompts = [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:4]]
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K})
    together = engine.generate(prompts, SEEDED)
    mixed = engine.generate(prompts, [capped(SEEDED, cap) for cap in (None, 0, None, 0)])
    assert [mixed[i].token_ids for i in (0, 2)] == [together[i].token_ids for i in (0, 2)]


def test_a_bad_value_is_a_value_error_that_names_the_field(serving, trained):
    pair = trained("dflash2")
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter)
    message = engine.probe("tests.engine.test_request_options:refusal", {"dflash": {"max_draft_tokens": -1}})
    assert "dflash.max_draft_tokens: Input should be greater than or equal to 0 (given: -1)" in message
    assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with pytest.raises(EngineError, match=r"vllm_xargs\.dflash\.workload"):
        engine.generate([[5, 6, 7]], GREEDY | {"extra_args": {"dflash.workload": ""}})


def refusal(llm, extra_args: dict) -> str:
    """Runs in the engine's process: the message of the ValueError."""
    from vllm import SamplingParams, TokensPrompt

    try:
        llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7]), SamplingParams(extra_args=extra_args), use_tqdm=False)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was accepted")


def test_an_id_that_comes_again_has_its_own_options():
    """Ids may be the user's own (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION); the second comes as the first one ends."""
    table = RequestTable()
    for most in (0, 3, None):
        extra_args = {"dflash": {"max_draft_tokens": most, "workload": "test"}}
        sampling = SamplingParams(extra_args=extra_args)
        assert table.options("a", sampling).max_draft_tokens == most
        assert table.options("a", sampling) is table.options("a", sampling)
        table.forget({"a"})
