# SPDX-License-Identifier: Apache-2.0
"""Steps without drafts leave their context for later: whoever reads it then finds what each step would have written."""

from typing import Any

import pytest

from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.engine.test_block_length import check
from tests.engine.test_faults import raise_in, restore_methods, state
from tests.support.checkpoints import DrafterShape

pytestmark = pytest.mark.engine

K = 7
BLOCK = 32
AUTO = {"dflash": {"block_length": "auto", "metrics": False}}
WINDOW = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 40}


def greedy(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}


def drafter(llm):
    from tests.support.engine_process import model_runner

    return model_runner(llm).drafter


def draft_from_now_on(llm, drafts: int, every: int = 1) -> None:
    """Runs in the engine's process: so many drafts for everybody, in one step of `every`."""
    steps = iter(range(1 << 60))

    def plan(request_ids: list[str], context: float, requests: int | None = None) -> list[int]:
        return [drafts if next(steps) % every == every - 1 else 0] * len(request_ids)

    drafter(llm).lengths.planner.controller.plan = plan


def rows_kept(llm) -> int:
    return drafter(llm).pending.rows


def join_midway(llm, first: list[int], behind: list[int], steps: int) -> tuple[list[int], list[int], int]:
    """A request without drafts for so many steps, then another that begins like it, and drafts for both.

    -> tokens of the first, prompt of the second, rows that were kept when it came.
    """
    from vllm import SamplingParams, TokensPrompt

    engine = llm.llm_engine
    tokens: dict[str, list[int]] = {"first": [], "second": []}

    def step() -> None:
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)

    draft_from_now_on(llm, 0)
    engine.add_request("first", TokensPrompt(prompt_token_ids=first), SamplingParams(**greedy(steps + 40)))
    for _ in range(steps):
        step()
    kept = rows_kept(llm)
    draft_from_now_on(llm, K)
    prompt = first + tokens["first"] + behind
    engine.add_request("second", TokensPrompt(prompt_token_ids=prompt), SamplingParams(**greedy(20)))
    while engine.has_unfinished_requests():
        step()
    return tokens["first"], tokens["second"], kept


@pytest.fixture(scope="module")
def start(serving, make):
    def start(shape: DrafterShape, **arguments):
        serving.needs_plugin("block_length")
        pair = make(shape)
        engine = serving.process(shape)
        engine.start(
            pair.target,
            pair.drafter,
            speculative={"num_speculative_tokens": K},
            additional_config=AUTO,
            **arguments,
        )
        return engine, pair

    return start


@pytest.mark.parametrize("windows", [{}, WINDOW], ids=["full", "mixed"])
def test_others_share_what_was_kept(start, windows):
    engine, pair = start(DrafterShape(architecture="dflash2", **windows))
    prompt, behind = tiny_prompts(pair.target_shape.vocab_size)[0][:70], [5, 6, 7]
    engine.probe(draft_from_now_on, 0)
    output = engine.generate([prompt], greedy(3 * BLOCK))[0]
    assert engine.probe(rows_kept) > 0, "every step wrote its own context: nothing is tested here"
    engine.traces()
    # It has ended with rows that are kept; its blocks are cached and go to the next one.
    engine.probe(draft_from_now_on, K)
    again = engine.generate([prompt + output.token_ids + behind], greedy(20))
    assert again[0].cached_tokens >= 2 * BLOCK + (0 if windows else 2 * BLOCK), again[0].cached_tokens
    assert check_drafts(pair, again, engine.traces(), K) >= 5


def test_another_request_begins_like_one_that_runs(start):
    engine, pair = start(DrafterShape(architecture="dflash2"))
    prompt = tiny_prompts(pair.target_shape.vocab_size)[1][:50]
    before = engine.counters()["prefix_cache_hits"]
    first, second, kept = engine.probe(join_midway, prompt, [9, 8], 60)
    assert kept > 0
    assert engine.counters()["prefix_cache_hits"] - before >= 3 * BLOCK
    traces = only_drafted(engine.traces())
    behind = prompt + first[:60] + [9, 8]
    outputs = [Finished("first", prompt, first), Finished("second", behind, second)]
    assert check_drafts(pair, outputs, traces, K) >= 10


def only_drafted(traces: dict) -> dict:
    for trace in traces.values():
        trace.steps = [step for step in trace.steps if step.drafts]
    return traces


class Finished:
    """What check_drafts reads of an Output."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], token_ids: list[int]) -> None:
        self.request_id, self.prompt_token_ids, self.token_ids = request_id, prompt_token_ids, token_ids


def test_blocks_that_change_hands(start):
    """Preempted and ended requests lose their blocks to others while rows of theirs are kept."""
    engine, pair = start(
        DrafterShape(architecture="dflash2"), num_gpu_blocks_override=24, max_num_batched_tokens=384
    )
    engine.probe(draft_from_now_on, K, 9)
    prompts = [prompt[-90:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:12]]
    sampling = [greedy(length) for length in (20, 33, 47, 64) * 3]
    outputs = engine.generate(prompts, sampling)
    traces = engine.traces()
    assert sum(trace.preemptions for trace in traces.values()) >= 2
    assert sum(map(bool, check(pair, outputs, traces, K))) >= 12


def test_a_fault_while_it_is_written(start):
    engine, pair = start(DrafterShape(architecture="dflash2"))
    prompts = tiny_prompts(pair.target_shape.vocab_size)[:2]
    engine.probe(draft_from_now_on, K, 20)
    # The first call is the prompts' own, the second writes the 20 steps before the first drafts.
    engine.probe(raise_in, "combine_hidden_states", 2, 1)
    outputs = engine.generate([prompt[:40] for prompt in prompts], greedy(90))
    engine.probe(restore_methods)
    assert engine.probe(state) == ({"exception": 1}, True)
    traces = only_drafted(engine.traces())
    assert all(traces[output.request_id].steps for output in outputs), "somebody was not drafted for again"
    # What the fault left unwritten, and all before it, is no context; whole blocks are left out.
    missing = {output.request_id: -(-(len(output.prompt_token_ids) + 20) // BLOCK) * BLOCK for output in outputs}
    assert check_drafts(pair, outputs, traces, K, starts=missing) >= len(outputs)
