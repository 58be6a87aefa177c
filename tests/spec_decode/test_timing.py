# SPDX-License-Identifier: Apache-2.0
"""StageClock on a host clock and on events that complete late."""

from typing import ClassVar

import pytest

from vllm_dflash.spec_decode import StageClock, Timing


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class Event:
    """A device event, which completes when the test says so."""

    made: ClassVar[list["Event"]] = []

    def __init__(self, hands: Hands) -> None:
        self.hands, self.at, self.complete = hands, 0.0, False
        Event.made.append(self)

    def record(self) -> None:
        self.at, self.complete = self.hands.at, False

    def query(self) -> bool:
        return self.complete

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1000


def test_host_clock_times_each_stage_with_its_step() -> None:
    hands = Hands()
    clock = StageClock("cpu", now=hands)
    clock.begin_step(requests=3, context_tokens=40)
    with clock.stage("target", rows=24):
        hands.at += 0.25
    with clock.stage("draft", rows=12):
        hands.at += 0.5
    clock.begin_step(requests=2, context_tokens=50)
    with clock.stage("target", rows=2):
        hands.at += 1.0
    assert clock.take() == [
        Timing("target", 0.25, 24, 3, 40, 1),
        Timing("draft", 0.5, 12, 3, 40, 1),
        Timing("target", 1.0, 2, 2, 50, 2),
    ]
    assert clock.take() == []


def test_events_are_read_once_they_have_completed_and_used_again() -> None:
    hands = Hands()
    Event.made.clear()
    clock = StageClock("cuda", event=lambda: Event(hands))
    for seconds in (0.125, 0.25):
        clock.begin_step(requests=1, context_tokens=0)
        with clock.stage("verify", rows=8):
            hands.at += seconds
    first, second = Event.made[:2], Event.made[2:]
    assert clock.take() == []
    for event in first:
        event.complete = True
    assert clock.take() == [Timing("verify", 0.125, 8, 1, 0, 1)]
    for event in second:
        event.complete = True
    assert clock.take() == [Timing("verify", 0.25, 8, 1, 0, 2)]
    with clock.stage("verify"):
        pass
    assert len(Event.made) == 4


def test_a_stage_that_raises_is_not_timed() -> None:
    clock = StageClock()
    with pytest.raises(ValueError), clock.stage("draft"):
        raise ValueError
    assert clock.take() == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_nobody_takes_is_bounded(device: str) -> None:
    hands = Hands()
    clock = StageClock(device, event=lambda: Event(hands), most=10)
    for _ in range(100):
        with clock.stage("select"):
            pass
    assert len(clock._done) + len(clock._waiting) == 10
