# SPDX-License-Identifier: Apache-2.0
"""Positions without draft KV are never attended: restored by a KV connector, or missed by a drafter that faulted.

vllm#47930 (acceptance of 0.3 % where requests restore a shared prefix) and sglang#24683, sglang#28390 (the decode side
of a disaggregated pair starts without draft context).
"""

import math

import pytest

from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.support import connector
from tests.support.checkpoints import DrafterShape
from tests.support.engine_process import drafter

pytestmark = pytest.mark.engine

K = 7
BLOCK = 32
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SLIDING = ("sliding_attention", "sliding_attention")
SHAPES = {
    "dflash": DrafterShape(architecture="dflash"),
    "dflash2": DrafterShape(architecture="dflash2"),
    "sliding": DrafterShape(
        architecture="dflash2", layer_types=SLIDING, sliding_window=40, is_causal=False
    ),
}


def reset(llm, fill: float) -> None:
    """Runs in the engine's process: nothing is cached any more, and the next blocks restored hold `fill`."""
    from tests.support.engine_process import engine_core

    assert engine_core(llm).scheduler.kv_cache_manager.reset_prefix_cache()
    connector.DRAFT_FILL[0] = fill


def empty_store(llm) -> None:
    connector.STORE.clear()


def restored_positions(llm) -> int:
    return drafter(llm).worker.tally.restored_context


@pytest.mark.parametrize("name", SHAPES)
def test_restored_positions_are_never_attended(serving, make, name):
    serving.needs_plugin("masked context")
    pair = make(SHAPES[name])
    engine = serving.process(SHAPES[name])
    # Metrics would empty the tally that is read here.
    settings = {"kv_transfer_config": connector.settings(), "additional_config": {"dflash": {"metrics": False}}}
    if name == "sliding":
        # Stock turns the layers' groups into one where a connector does not say that it knows several.
        settings["disable_hybrid_kv_cache_manager"] = True
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K}, **settings)
    engine.probe(empty_store)
    # Their full blocks end at 96, 96 and 64; one is too short to restore anything.
    prompts = [prompt[:length] for prompt, length in zip(tiny_prompts(128)[::4], (97, 120, 66, 20), strict=False)]
    restored = [96, 96, 64, 0]
    cold = engine.generate(prompts, GREEDY)
    check_drafts(pair, cold, engine.traces(), K)
    before = engine.probe(restored_positions)

    drafts = {}
    for fill in (0.0, 1e4, math.nan):
        engine.probe(reset, fill)
        outputs = engine.generate(prompts, GREEDY)
        traces = engine.traces()
        assert [output.token_ids for output in outputs] == [output.token_ids for output in cold]
        starts = {output.request_id: start for output, start in zip(outputs, restored, strict=True)}
        assert check_drafts(pair, outputs, traces, K, starts=starts) >= len(prompts)
        drafts[fill] = [[step.drafts for step in traces[output.request_id].steps] for output in outputs]
    assert drafts[0.0] == drafts[1e4] and list(drafts.values())[2] == drafts[0.0]
    assert engine.probe(restored_positions) - before == 3 * sum(restored)

    # The blocks are in the engine's own prefix cache now; who shares them is as blind.
    again = engine.generate(prompts, GREEDY)
    assert engine.counters()["prefix_cache_hits"] > 0
    starts = {output.request_id: start for output, start in zip(again, restored, strict=True)}
    check_drafts(pair, again, engine.traces(), K, starts=starts)

    # Computed anew, into blocks that were blind before, the context is whole.
    engine.probe(reset, math.nan)
    engine.probe(empty_store)
    outputs = engine.generate(prompts, GREEDY)
    check_drafts(pair, outputs, engine.traces(), K)


def test_acceptance_recovers_as_the_context_fills(serving, trained):
    """After a restore of the whole prompt, what the request itself generates becomes context again."""
    serving.needs_plugin("masked context")
    pair = trained("dflash2")
    engine = serving.process(pair.drafter_shape)
    speculative = {"num_speculative_tokens": K}
    engine.start(pair.target, pair.drafter, speculative=speculative, kv_transfer_config=connector.settings())
    engine.probe(empty_store)
    prompts = [prompt[-97:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:8] if len(prompt) >= 97]
    long = GREEDY | {"max_tokens": 200}
    lengths = []
    for _ in range(2):
        engine.generate(prompts, long)
        steps = [step for trace in engine.traces().values() for step in trace.verified if step.anchor_position > 180]
        lengths.append(1 + sum(step.accepted for step in steps) / len(steps))
        engine.probe(reset, math.nan)
    whole, restored = lengths
    print(f"acceptance length past position 180: {whole:.2f} cold, {restored:.2f} after a restore")
    assert restored > 1 + 0.8 * (whole - 1)
