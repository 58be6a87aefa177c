# SPDX-License-Identifier: Apache-2.0
"""The drafter inside the engine against the plain torch reference: every draft of every step, token for token."""

import pytest
import torch

from tests.engine import probes
from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.support.checkpoints import DrafterShape, TargetShape

pytestmark = pytest.mark.engine

SLIDING = ("sliding_attention", "sliding_attention")
MIXED = ("sliding_attention", "full_attention")
SHAPES = {
    "full": {},
    "one-layer": {"num_layers": 1, "target_layer_ids": (2,)},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": SLIDING, "sliding_window": 24},
    "sliding-non-causal": {"layer_types": SLIDING, "sliding_window": 24, "is_causal": False},
    "narrower-than-the-block": {"use_swa": True, "swa_window_size": 5},
    "mixed": {"layer_types": MIXED, "sliding_window": 24},
    "mixed-non-causal": {"layer_types": MIXED, "sliding_window": 40, "causal": False},
    "block-of-4": {"block_size": 4},
    "block-of-16": {"block_size": 16},
    "interleaved-rope": {"is_neox_style": False, "rope_theta": 500.0},
    "default-rope": {"rope_theta": None},
    "biased": {"attention_bias": True, "attention_value_scale": 0.6},
    "sinks": {"attention_sink_bias": True},
    "other-width": {"hidden_size": 96, "own_embedding": True, "own_lm_head": True},
    "mask-embedding": {"mask_embedding": "tensor"},
    "speculators": {"dialect": "speculators", "causal": False},
}
FIRST_ONLY = {
    "reduced-vocabulary": {"draft_vocab_size": 48},
    "scaled-logits": {"logit_scale": 0.5},
}
SECOND_ONLY = {
    "softcap": {"output_multiplier": 2.0, "final_logit_softcapping": 3.0},
    "three-taps": {"conv_kernel_size": 3, "conv_group_size": 8},
    "scaled-embedding": {"input_embedding_scale": 3.0},
    "all-candidates": {"selector_top_k": 32, "selector_rank": 24},
}
CASES = [
    *(pytest.param("dflash", name, id=f"dflash-{name}") for name in SHAPES | FIRST_ONLY),
    *(pytest.param("dflash2", name, id=f"dflash2-{name}") for name in SHAPES | SECOND_ONLY),
]
PROMPTS = [prompt[:length] for prompt, length in zip(tiny_prompts(128), (3, 31, 32, 70, 150, 300), strict=False)]


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_drafts_are_the_references(serving, make, architecture, name):
    shape = DrafterShape(architecture=architecture, **(SHAPES | FIRST_ONLY | SECOND_ONLY)[name])
    pair = make(shape)
    engine = serving.process(shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": shape.num_speculative_tokens})
    outputs = engine.generate(PROMPTS, {"temperature": 0, "max_tokens": 12, "ignore_eos": True})
    assert check_drafts(pair, outputs, engine.traces(), shape.num_speculative_tokens) >= 5 * len(PROMPTS)


@pytest.mark.parametrize("name", ["mixed", "sliding"])
def test_draft_kv_by_one_operation_and_layer_by_layer(serving, make, name):
    """fp32 caches of a CPU have the layout that the operation writes straight; other backends write themselves."""
    if not serving.plugin or serving.runner != "v1":
        pytest.skip("about the V1 runner's plug-in")
    shape = DrafterShape(architecture="dflash2", **SHAPES[name])
    pair = make(shape)
    engine = serving.process(shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": shape.num_speculative_tokens})
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    first = engine.generate(PROMPTS, sampling)
    assert check_drafts(pair, first, engine.traces(), shape.num_speculative_tokens) >= 5 * len(PROMPTS)
    assert engine.probe(probes.write_draft_kv_layer_by_layer)
    prompts = [prompt[1:] for prompt in PROMPTS]
    second = engine.generate(prompts, sampling)
    assert check_drafts(pair, second, engine.traces(), shape.num_speculative_tokens) >= 5 * len(PROMPTS)
    assert not engine.probe(probes.write_draft_kv_layer_by_layer)


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_llama_target_and_fewer_drafts_than_the_block_holds(serving, make, architecture):
    shape = DrafterShape(architecture=architecture)
    pair = make(shape, TargetShape(family="llama", tie_embeddings=True, seed=7))
    engine = serving.process(shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 3})
    outputs = engine.generate(PROMPTS, {"temperature": 0, "max_tokens": 12, "ignore_eos": True})
    assert check_drafts(pair, outputs, engine.traces(), 3) >= 5 * len(PROMPTS)


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_drafts_that_are_often_right(serving, trained, architecture):
    """With a trained drafter the steps advance by one to eight tokens: context rows of every count are written."""
    pair = trained(architecture)
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7})
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=60)[:8]
    outputs = engine.generate(prompts, {"temperature": 0, "max_tokens": 64, "ignore_eos": True})
    traces = engine.traces()
    check_drafts(pair, outputs, traces, 7)
    accepted = {step.accepted for trace in traces.values() for step in trace.verified}
    assert {0, 1, 2, 3} <= accepted


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
@pytest.mark.parametrize("name", ["full", "mixed"])
def test_one_two_and_seven_chunks_leave_the_same_draft_kv(serving, make, architecture, name):
    """xinfer#481, mlx-vlm#2096, llama.cpp#27342: chunked prefill left drafters without the prompt's context."""
    shape = DrafterShape(architecture=architecture, **SHAPES[name])
    pair = make(shape)
    engine = serving.process(shape)
    engine.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": shape.num_speculative_tokens},
        max_num_batched_tokens=512,
    )
    prompt = tiny_prompts(128)[-1][:210]
    whole_chunks, whole = engine.probe(probes.draft_kv, prompt, 210)
    assert whole_chunks == 1
    assert len(whole) == shape.num_layers
    assert all(block.abs().sum() > 0 for blocks in whole.values() for block in blocks.values())
    for chunk, expected in ((105, 2), (30, 7)):
        chunks, found = engine.probe(probes.draft_kv, prompt, chunk)
        assert chunks == expected
        for layer, blocks in found.items():
            assert blocks, f"{layer} keeps no block of the prompt"
            for index, block in blocks.items():
                same = torch.allclose(block, whole[layer][index], rtol=1e-4, atol=1e-5)
                assert same, f"block {index} of {layer} in {chunks} chunks"
