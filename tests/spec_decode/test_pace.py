# SPDX-License-Identifier: Apache-2.0
"""The machine's pace follows what lasts."""

import pytest

from vllm_dflash.spec_decode.pace import LASTING, Pace


def test_outliers_leave_the_pace_where_it_is():
    pace = Pace()
    for ratio in (1, 1, 5, 5, 1, 1, 0.2, 1):
        pace.observe(ratio)
        assert pace.value == pytest.approx(1, abs=0.04)


def test_a_machine_that_became_slower_is_followed_in_three_steps():
    pace = Pace()
    for _ in range(3):
        pace.observe(1.6)
    assert pace.value == pytest.approx(1.6, rel=0.03)


def test_a_pause_of_many_steps_is_no_pace_until_it_lasts():
    pace = Pace()
    for _ in range(LASTING):
        pace.observe(5)
        assert pace.value == 1
    for _ in range(3):
        pace.observe(5)
    assert pace.value == pytest.approx(5, rel=0.03)


def test_a_drift_is_followed():
    pace = Pace()
    for step in range(200):
        pace.observe(1 + 0.1 * step / 200)
    assert pace.value == pytest.approx(1.1, abs=0.02)
