# SPDX-License-Identifier: Apache-2.0
"""What observers are told of a step, and numbers that arrive late."""

import torch

from tests.spec_decode.test_worker import MASK, C, K, TableDrafter, V, anchors, hidden_of
from vllm_dflash.spec_decode import SpecDecodeWorker, StepOutcome, Timing, VerifyInputs
from vllm_dflash.spec_decode.outcome import Readback


def watched() -> tuple[SpecDecodeWorker, list[StepOutcome], list[Timing]]:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, False)
    outcomes: list[StepOutcome] = []
    timings: list[Timing] = []
    worker.observers.append(outcomes.append)
    worker.timing_observers.append(timings.extend)
    return worker, outcomes, timings


def inputs_for(ids: list[str], drafts: list[list[int]], right: list[int]) -> VerifyInputs:
    """Greedy verification in which the target agrees with the first right[i] drafts of request i and no more."""
    counts = [len(row) for row in drafts]
    logits = torch.zeros(sum(counts) + len(ids), V)
    row = 0
    draft_rows, bonus_rows = [], []
    for tokens, agreed in zip(drafts, right, strict=True):
        for position, token in enumerate(tokens):
            logits[row, token if position < agreed else (token + 1) % V] = 9.0
            draft_rows.append(row)
            row += 1
        logits[row, 5] = 9.0
        bonus_rows.append(row)
        row += 1
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    flat = [token for tokens in drafts for token in tokens]
    count = len(ids)
    return VerifyInputs(
        ids, counts, logits, torch.tensor(draft_rows, dtype=torch.int64), torch.tensor(bonus_rows),
        torch.tensor(flat, dtype=torch.int64), starts, torch.zeros(count), torch.zeros(count, dtype=torch.int64),
        torch.full((count,), 10),
    )  # fmt: skip


def test_an_outcome_counts_drafts_and_accepted_ones_by_request() -> None:
    worker, outcomes, timings = watched()
    drafts = worker.draft(anchors(3), hidden_of).token_ids.tolist()
    worker.verify(inputs_for(["r0", "r1", "r2"], drafts, [0, 2, K]))
    assert outcomes == [StepOutcome(["r0", "r1", "r2"], [K] * 3, [0, 2, K], {})]
    worker.end_step(["r0", "r1", "r2"])
    assert len(outcomes) == 1
    assert [(t.stage, t.rows) for t in timings] == [("draft", 3 * (1 + K)), ("select", 3 * K), ("verify", 3 * (1 + K))]
    assert all(t.seconds > 0 for t in timings)


def test_fewer_drafts_than_drawn_and_none() -> None:
    worker, outcomes, _ = watched()
    drafts = worker.draft(anchors(3), hidden_of).token_ids.tolist()
    worker.verify(inputs_for(["r1", "r0", "r2"], [drafts[1][:2], [], drafts[2][:1]], [2, 0, 0]))
    worker.end_step(["r1", "r0", "r2"])
    assert outcomes == [StepOutcome(["r1", "r2"], [2, 1], [2, 0], {}), StepOutcome(["r0"], [0], [0], {})]


def test_placeholders_are_no_drafts() -> None:
    """Asynchronous scheduling plans rows for drafts that were not made; padding is -1 or token 0."""
    worker, outcomes, _ = watched()
    drafts = worker.draft(anchors(2, position=10, limit=12), hidden_of).token_ids.tolist()
    first = [row[0] for row in drafts]
    rows = [[first[0], 0, 0], [-1, -1, -1], [0, 0, 0]]
    worker.verify(inputs_for(["r0", "r1", "unknown"], rows, [1, 0, 0]))
    assert outcomes[0].drafted == [1, 0, 0]
    assert outcomes[0].accepted == [1, 0, 0]


def test_skipped_drafts_come_with_the_next_outcome_once() -> None:
    worker, outcomes, _ = watched()
    worker.draft(anchors(2, position=11, limit=12), hidden_of)
    worker.tally.skip("prompt", 4)
    worker.end_step(["r0"])
    worker.end_step(["r0"])
    assert [outcome.skipped for outcome in outcomes] == [{"range": 2, "prompt": 4}, {}]


class Done:
    """An event that is done once it is told so, or waited for."""

    def __init__(self) -> None:
        self.done = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def late() -> tuple[Readback, list[Done]]:
    events: list[Done] = []

    def event() -> Done:
        events.append(Done())
        return events[-1]

    return Readback(event), events


def test_numbers_of_a_device_arrive_in_order_when_their_event_is_done() -> None:
    readback, events = late()
    got: list[int] = []
    for value in (1, 2):
        readback.read(torch.tensor([value]), got.extend)
    readback.poll()
    events[1].done = True
    readback.poll()
    assert got == []
    events[0].done = True
    readback.poll()
    assert got == [1, 2]


def test_numbers_that_ranks_hear_in_the_same_step() -> None:
    """At the third poll: not before, whoever is done, and not after, whoever is not."""
    for done in (False, True):
        readback, events = late()
        readback.after = 3
        heard: list[int] = []
        by_step = []
        for step in range(5):
            readback.read(torch.tensor(step), heard.append)
            events[-1].done = done
            readback.poll()
            by_step.append(list(heard))
        assert by_step == [[], [], [0], [0, 1], [0, 1, 2]]
        assert [event.done for event in events] == [True, True, True, done, done]


def test_a_processor_has_them_at_once() -> None:
    got: list[int] = []
    Readback().read(torch.tensor([3]), got.extend)
    assert got == [3]
