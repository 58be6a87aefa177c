# SPDX-License-Identifier: Apache-2.0
"""The drafter's attention backend XFORMERS in an engine: the V2 runner under Triton's interpreter."""

import pytest

from tests.engine import probes
from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.support.checkpoints import DrafterShape

pytestmark = pytest.mark.engine


def test_drafts_are_the_references(serving, make):
    """Non-causal blocks, a layer with a window and one without, grouped heads, sinks."""
    serving.needs_plugin("the backend")
    shape = DrafterShape(
        architecture="dflash2",
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=24,
        causal=False,
        attention_sink_bias=True,
    )
    pair = make(shape)
    engine = serving.processes(runner="v2", plugin=True)
    engine.probe(probes.let_a_cpu_take_custom_attention)
    speculative = {"num_speculative_tokens": shape.num_speculative_tokens, "attention_backend": "XFORMERS"}
    engine.start(pair.target, pair.drafter, speculative=speculative)
    target, drafter = engine.probe(probes.attention_classes)
    assert drafter == {"XFormersImpl"} and target == {"CPUAttentionBackendImpl"}
    prompts = [prompt[:length] for prompt, length in zip(tiny_prompts(128), (3, 33, 70), strict=False)]
    outputs = engine.generate(prompts, {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    assert check_drafts(pair, outputs, engine.traces(), shape.num_speculative_tokens) >= 3 * len(prompts)
