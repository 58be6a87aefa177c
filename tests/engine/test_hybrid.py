# SPDX-License-Identifier: Apache-2.0
"""A target with states (gated delta rule) beside attention: a draft that is rejected leaves nothing in them.

vLLM computes such layers on a CPU in bf16 alone, where near-ties fall either way: what is judged is how far behind the
best token an emitted one is, by Hugging Face's model in fp32. Prefix caching of states needs a GPU.
"""

import pytest
import torch
from transformers import Qwen3NextForCausalLM

from tests.engine.prompts import tiny_prompts
from tests.support.checkpoints import DrafterShape, TargetShape

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
BF16 = {"dtype": "bfloat16", "block_size": None, "num_gpu_blocks_override": None, "enable_prefix_caching": False}
LOGIT_STD = 8.0


def behind(model: Qwen3NextForCausalLM, outputs) -> list[float]:
    """The best token's logit less the emitted one's, of all emitted tokens."""
    gaps = []
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        gaps += (logits.amax(-1) - logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]).tolist()
    return gaps


def test_a_target_with_states_emits_its_own_tokens(serving, make):
    shape = DrafterShape(architecture="dflash2")
    pair = make(shape, TargetShape(family="qwen3_next", logit_std=LOGIT_STD))
    engine = serving.process(shape)
    prompts = [prompt[:length] for prompt, length in zip(tiny_prompts(128)[::4], (64, 65, 96, 120, 150), strict=False)]
    model = Qwen3NextForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    engine.start(pair.target, **BF16)
    plain = behind(model, engine.generate(prompts, GREEDY))
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **BF16)
    drafted = behind(model, engine.generate(prompts, GREEDY))
    steps = [step for trace in engine.traces().values() for step in trace.verified]
    assert len(steps) > 100
    assert max(plain) < 0.1 * LOGIT_STD and max(drafted) < 0.1 * LOGIT_STD
