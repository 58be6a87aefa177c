# SPDX-License-Identifier: Apache-2.0
"""Limits that a request or the user sets hold under speculation as without it."""

import pytest
from vllm.config import ReasoningConfig

from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.support.checkpoints import DrafterShape
from tests.support.engine_process import engine_core

pytestmark = pytest.mark.engine


def test_a_thinking_budget_ends_where_it_does_without_speculation(serving, trained):
    """The budget's state is brought up to date once a step, before the rows to verify are judged."""
    pair = trained("dflash2")
    reasoning = ReasoningConfig(reasoning_start_str="t3", reasoning_end_str="t4")
    prompts = [
        [token for token in prompt if token > 4] + [3]
        for prompt in tiny_prompts(pair.target_shape.vocab_size, longest=24)[:6]
    ]
    engine = serving.process(pair.drafter_shape)
    tokens = []
    for drafter in (None, pair.drafter):
        engine.start(pair.target, drafter, reasoning_config=reasoning)
        for budget in (0, 3, 5, 9):
            sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "thinking_token_budget": budget}
            tokens.append([output.token_ids for output in engine.generate(prompts, sampling)])
    plain, speculative = (
        [[first_thought(ids) for ids in budget] for budget in half] for half in (tokens[:4], tokens[4:])
    )
    assert plain[0] == [[]] * 6
    assert max(len(thought) for thought in plain[3]) == 9
    assert speculative == plain


def first_thought(token_ids: list[int]) -> list[int]:
    """The tokens before the first end of thinking. Stock counts a second thought otherwise when it sees drafts."""
    return token_ids[: token_ids.index(4)]


def test_the_users_longest_draft_sequence_holds(serving, trained):
    """`max_model_len` in --speculative-config: no draft at or past that position, and the same tokens."""
    pair = trained("dflash2")
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:4]
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target)
    plain = [output.token_ids for output in engine.generate(prompts, greedy)]
    engine.start(pair.target, pair.drafter, speculative={"max_model_len": 64})
    outputs = engine.generate(prompts, greedy)
    assert [output.token_ids for output in outputs] == plain
    ends = [
        step.anchor_position + len(step.drafts)
        for trace in engine.traces().values()
        for step in trace.steps
        if step.drafts
    ]
    assert max(ends) == 63
    assert max(len(output.prompt_token_ids) + len(output.token_ids) for output in outputs) > 64


WINDOWED = {
    "full": DrafterShape(architecture="dflash"),
    "second": DrafterShape(architecture="dflash2"),
    "mixed": DrafterShape(
        architecture="dflash2", layer_types=("full_attention", "sliding_attention"), sliding_window=100
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_over_full_attention(serving, make, name):
    """dflash#66: with `draft_window` no draft sees a position outside it; the drafts are the windowed reference's."""
    serving.needs_plugin("draft_window")
    pair = make(WINDOWED[name])
    engine = serving.process(WINDOWED[name])
    options = {"dflash": {"draft_window": 40}}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, additional_config=options)
    texts = tiny_prompts(128)
    prompts = [texts[0][:300], texts[1][:20], texts[2][:128], texts[3][:97]]
    greedy = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    for _ in range(2):  # the second time from cached prefixes
        outputs = engine.generate(prompts, greedy)
        traces = engine.traces()
        assert check_drafts(pair, outputs, traces, 7, window=40) >= 4 * len(prompts)
    with pytest.raises(AssertionError, match="anchor at"):
        check_drafts(pair, outputs, traces, 7)


def test_drafts_go_on_past_the_trained_range_where_that_is_asked_for(serving, make):
    """`extend_draft_range`: the rotary formula goes on, and so do the drafts, as the reference computes them."""
    serving.needs_plugin("extend_draft_range")
    shape = DrafterShape(architecture="dflash2", max_positions=64)
    pair = make(shape)
    engine = serving.process(shape)
    options = {"dflash": {"extend_draft_range": True}}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, additional_config=options)
    texts = tiny_prompts(128)
    outputs = engine.generate([texts[0][:300], texts[1][:50]], {"temperature": 0, "max_tokens": 40, "ignore_eos": True})
    traces = engine.traces()
    assert check_drafts(pair, outputs, traces, 7) > 20
    assert all(step.drafts for trace in traces.values() for step in trace.steps)


_rows: list[int] = []


def watch_rows(llm) -> None:
    """From now on keeps the rows of each step."""
    scheduler = engine_core(llm).scheduler
    stock = scheduler.update_from_output

    def update(scheduler_output, output):
        _rows.append(scheduler_output.total_num_scheduled_tokens)
        return stock(scheduler_output, output)

    _rows.clear()
    scheduler.update_from_output = update


def most_rows(llm) -> int:
    return max(_rows)


def test_a_token_budget_that_is_too_small_is_told_with_the_right_one(serving, trained):
    """vllm#53970, vllm#51256: requests waited for one another without a word, or the engine read out of range."""
    serving.needs_plugin("a warning at start-up")
    pair = trained("dflash2")
    prompts = [prompt[-30:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:24]]
    greedy = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, max_num_seqs=24)
    plain = [output.token_ids for output in engine.generate(prompts, greedy)]
    small = {"max_num_seqs": 24, "max_num_batched_tokens": 100, "max_model_len": 96}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **small)
    assert [output.token_ids for output in engine.generate(prompts, greedy)] == plain
    assert "take 24 x 15 = 360 a step: more than 6 of them wait" in engine.printed()
    assert "Set --max-num-batched-tokens 360, or --max-num-seqs 6." in engine.printed()
    told = engine.printed().count("wait for one another")
    # Of rows alone 24 x 8 = 192 are enough: all requests verify all their drafts in one step.
    enough = small | {"max_num_batched_tokens": 360, "max_num_scheduled_tokens": 192}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **enough)
    engine.probe(watch_rows)
    assert [output.token_ids for output in engine.generate(prompts, greedy)] == plain
    assert engine.probe(most_rows) == 192
    assert engine.printed().count("wait for one another") == told
    scarce = enough | {"max_num_scheduled_tokens": 100}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **scarce)
    assert [output.token_ids for output in engine.generate(prompts, greedy)] == plain
    assert "Set --max-num-scheduled-tokens 192, or --max-num-seqs 12." in engine.printed()


@pytest.mark.slow
def test_rows_that_are_no_whole_number_of_blocks(serving, trained):
    """torch.compile with a block of 7 rows: profiling and padding give rows that 7 does not divide."""
    pair = trained("dflash2")
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:4]
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    engine = serving.process(pair.drafter_shape)
    compiled = {"enforce_eager": False, "max_num_batched_tokens": 100, "max_num_seqs": 8}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 6}, **compiled)
    speculative = [output.token_ids for output in engine.generate(prompts, greedy)]
    engine.start(pair.target)
    assert speculative == [output.token_ids for output in engine.generate(prompts, greedy)]


@pytest.mark.slow
def test_more_draft_rows_than_torch_compile_was_told(serving, trained):
    """vllm#53970: eight requests end their prompts in one step of 40 tokens, and 64 rows draft behind them."""
    pair = trained("dflash2")
    prompts = [prompt[:5] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:8]]
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    engine = serving.process(pair.drafter_shape)
    few = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "max_model_len": 64}
    seven = {"num_speculative_tokens": 7}
    engine.start(pair.target, pair.drafter, speculative=seven, enforce_eager=serving.runner == "v2", **few)
    speculative = [output.token_ids for output in engine.generate(prompts, greedy)]
    engine.start(pair.target, **few)
    assert speculative == [output.token_ids for output in engine.generate(prompts, greedy)]
