# SPDX-License-Identifier: Apache-2.0
"""The controller against the better of plain decoding and the best fixed length, over loads from cost tables."""

import pytest

from vllm_dflash.bench.simulator.loads import all_loads, drafts_of, names, table
from vllm_dflash.bench.simulator.simulate import Load, Simulator


@pytest.mark.parametrize("name", names())
def test_tables_reach_over_all_loads_and_say_where_they_are_from(name):
    cost = table(name)
    for load in all_loads():
        assert cost.seconds(drafts_of(name), load.requests, load.context) > cost.seconds(0, load.requests, load.context)


@pytest.mark.parametrize("name", names())
def test_never_far_from_the_better_of_plain_and_fixed(name):
    """vllm#42505, vllm#54691, vllm#48627, vllm#54801: by concurrency, by context, by both, in any order."""
    simulator = Simulator(table(name), drafts_of(name), seed=5)
    for load in all_loads(5)[:24]:
        outcome = simulator.run(load)
        assert outcome.ratio >= 0.97, outcome


def test_long_context_with_a_full_attention_draft_goes_plain():
    """vllm#54691: 71 tokens/s fell to 12 at 185k; dflash#66: 200 to 24 at 64k."""
    simulator = Simulator(table("full_attention_8b"), 15)
    assert simulator.run(Load(1, 500, 5.0)).mean_drafts > 8
    outcome = simulator.run(Load(1, 185_000, 3.0))
    assert outcome.fixed < 0.7 * outcome.plain and outcome.ratio > 0.97
