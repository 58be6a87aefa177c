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


@pytest.mark.parametrize("name", names())
def test_pauses_of_the_machine_are_not_what_a_load_costs(name):
    """Two to sixteen times in a row five times as long: loads stood at 0.57 to 0.9 once."""
    simulator = Simulator(table(name), drafts_of(name), 30, outliers=0.002, pauses=(2, 4, 8, 16))
    for load in [load for load in all_loads(30) if load.requests <= 8][:60]:
        outcome = simulator.run(load)
        assert outcome.ratio >= 0.95, outcome


def test_long_context_with_a_full_attention_draft_goes_plain():
    """vllm#54691: 71 tokens/s fell to 12 at 185k; dflash#66: 200 to 24 at 64k."""
    simulator = Simulator(table("full_attention_8b"), 15)
    assert simulator.run(Load(1, 500, 5.0)).mean_drafts > 8
    outcome = simulator.run(Load(1, 185_000, 3.0))
    assert outcome.fixed < 0.7 * outcome.plain and outcome.ratio > 0.97


@pytest.mark.parametrize(
    ("name", "before", "load"),
    [
        ("two_cores_smollm2", Load(16, 32_000, 1.5), Load(1, 185_000, 7.0)),
        ("full_attention_8b", Load(1, 4_000, 2.0), Load(1, 32_000, 5.0)),
        ("full_attention_8b", Load(4, 4_000, 2.0), Load(2, 500, 1.5)),
        ("rtx3090_27b_hybrid", Load(8, 4_000, 1.5), Load(2, 32_000, 1.5)),
    ],
    ids=str,
)
def test_where_a_probe_costs_steps_or_drafts_pay_little(name, before, load):
    """Text that turns predictable at 185k, and drafts worth 4 to 6 %: 0.81 to 0.96 once."""
    simulator = Simulator(table(name), drafts_of(name), seed=1)
    simulator.run(before, 0, 500)
    outcome = simulator.run(load)
    assert outcome.fixed > 1.03 * outcome.plain and outcome.ratio >= 0.97, outcome
