# SPDX-License-Identifier: Apache-2.0
"""The metrics' work a step, in processor time, against the shortest step that the demo pair was seen to take."""

import pytest

from vllm_dflash.bench.metrics.work import measure

STEP = {1: 17e-3, 8: 17e-3, 256: 60e-3}  # seconds; with 256 requests a step of any pair takes longer than that


@pytest.mark.parametrize("requests", STEP)
def test_under_a_hundredth_of_a_step(requests: int) -> None:
    work = min((measure(requests, 7, repeats=10) for _ in range(3)), key=lambda one: one.worker)
    assert 0 < work.worker < 0.01 * STEP[requests]
    assert 0 < work.transport < 0.01 * STEP[requests]
    assert 0 < work.front_end < 0.01 * STEP[requests]
