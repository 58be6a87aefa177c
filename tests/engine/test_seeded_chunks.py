# SPDX-License-Identifier: Apache-2.0
"""A seeded request gives the same tokens whether its prompt comes whole or in chunks, alone or beside others."""

import pytest

from tests.engine.prompts import tiny_prompts
from tests.support.checkpoints import DrafterShape

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_chunks_and_neighbours_do_not_change_a_seeded_request(serving, make, architecture):
    shape = DrafterShape(architecture=architecture)
    pair = make(shape)
    prompts = [prompt[:200] for prompt in tiny_prompts(128)[-4:]]
    sampling = [{"temperature": 1.0, "seed": 11 + i, "max_tokens": 24, "ignore_eos": True} for i in range(4)]
    engine = serving.process(shape)
    speculative = {"num_speculative_tokens": shape.num_speculative_tokens}
    engine.start(pair.target, pair.drafter, speculative=speculative)
    whole = [engine.generate([p], [s])[0].token_ids for p, s in zip(prompts, sampling, strict=True)]
    engine.start(pair.target, pair.drafter, speculative=speculative, max_num_batched_tokens=72, max_num_seqs=4)
    chunked = [output.token_ids for output in engine.generate(prompts, sampling)]
    assert any(trace.unfinished_chunks for trace in engine.traces().values())
    assert chunked == whole
