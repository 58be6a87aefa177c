# SPDX-License-Identifier: Apache-2.0
"""The fault guard under a test clock: counts, one log line a minute, off after three failed steps in a row."""

import logging

import pytest

from vllm_dflash.spec_decode import FaultGuard
from vllm_dflash.spec_decode.faults import FORWARD, WRITING
from vllm_dflash.spec_decode.outcome import Tally


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.step = 0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def guarded(caplog):
    caplog.set_level(logging.WARNING, logger="vllm_dflash")
    clock = Clock()
    return FaultGuard(Tally(), lambda: clock.step, clock), clock, caplog


def fail(guard: FaultGuard, clock: Clock, stage: str, steps: int = 1) -> None:
    for _ in range(steps):
        clock.step += 1
        guard.exception(stage, RuntimeError("boom"))


def test_a_fault_between_good_steps_never_switches_off(guarded) -> None:
    guard, clock, _ = guarded
    for _ in range(20):
        fail(guard, clock, FORWARD, 2)
        clock.step += 1
        guard.non_finite(0, 4)
    assert guard.enabled and guard.tally.faults == {"exception": 40}


def test_three_in_a_row_switch_off_for_good_and_say_so_once(guarded) -> None:
    guard, clock, caplog = guarded
    fail(guard, clock, FORWARD)
    clock.step += 1
    guard.non_finite(2, 2)
    assert guard.enabled
    fail(guard, clock, WRITING)
    assert not guard.enabled
    clock.step += 1
    guard.non_finite(0, 1)
    fail(guard, clock, FORWARD)
    assert not guard.enabled and guard.tally.faults["disabled"] == 1
    loud = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(loud) == 1 and "speculation is OFF" in loud[0].message and "Restart the server" in loud[0].message


def test_a_step_that_faults_in_several_places_counts_once(guarded) -> None:
    guard, clock, _ = guarded
    clock.step = 1
    for stage in (WRITING, WRITING, FORWARD):
        guard.exception(stage, RuntimeError("boom"))
    assert guard.enabled and guard.tally.faults == {"exception": 3}
    fail(guard, clock, WRITING)
    assert guard.enabled
    fail(guard, clock, WRITING)
    assert not guard.enabled


def test_faults_hours_apart_are_not_in_a_row_where_no_drafts_are_drawn(guarded) -> None:
    guard, clock, _ = guarded
    for _ in range(9):
        fail(guard, clock, WRITING)
        clock.step += 10_000
        guard.worked(WRITING)
    assert guard.enabled


def test_a_forward_that_always_fails_is_found_out_though_the_context_is_written(guarded) -> None:
    guard, clock, _ = guarded
    for _ in range(3):
        for _ in range(100):
            clock.step += 1
            guard.worked(WRITING)
        guard.exception(FORWARD, RuntimeError("boom"))
    assert not guard.enabled


def test_one_requests_context_is_no_sign_of_a_broken_drafter(guarded) -> None:
    guard, clock, _ = guarded
    for clock.step in range(10):
        guard.non_finite(1, 4)
    assert guard.enabled and guard.tally.faults == {"non_finite": 10}


def test_the_log_has_one_line_a_minute_with_the_number_since(guarded) -> None:
    guard, clock, caplog = guarded
    for clock.step in range(50):
        guard.exception(FORWARD, ValueError("boom"))
        guard.non_finite(0, 1)
        clock.seconds += 2.5
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3
    assert "its forward raised ValueError: boom" in lines[0] and "faults since" not in lines[0]
    assert "(24 faults since the last such line)" in lines[1]
