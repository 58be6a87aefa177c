# SPDX-License-Identifier: Apache-2.0
"""One target and one drafter forward a step, whatever the batch (pegainfer#436), and none where nobody drafts."""

import pytest

from tests.engine import probes
from tests.engine.prompts import tiny_prompts

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_one_forward_each_a_step(serving, trained, architecture):
    pair = trained(architecture)
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, max_num_batched_tokens=256)
    engine.probe(probes.count_forwards)
    sampling = [{"temperature": index % 2, "max_tokens": 8 + index, "ignore_eos": True} for index in range(12)]
    engine.generate(tiny_prompts(pair.target_shape.vocab_size, longest=90)[:12], sampling)
    steps = engine.probe(probes.forward_counts)
    sizes = {step["requests"] for step in steps}
    assert max(sizes) == 12 and min(sizes) < 4
    assert any(step["drafting"] < step["requests"] for step in steps), "no step held a request in mid-prompt"
    for step in steps:
        assert set(step["target"]) == {1}
        if step["drafting"]:
            assert set(step["drafter"]) == {1}
        else:
            assert set(step["drafter"]) <= {0, 1}
