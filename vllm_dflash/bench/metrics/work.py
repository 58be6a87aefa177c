# SPDX-License-Identifier: Apache-2.0
"""The metric work of one step, done without an engine and timed on this thread's own processor time."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from vllm_dflash.metrics.exporter import Exporter, unregister
from vllm_dflash.metrics.recorder import Recorder
from vllm_dflash.metrics.workloads import Workloads
from vllm_dflash.spec_decode import DraftBlock, SpecDecodeWorker, VerifyInputs
from vllm_dflash.spec_decode.timing import STAGES
from vllm_dflash.spec_decode.verification import drafted_counts

ROUNDS = 30


@dataclass(frozen=True)
class Work:
    """Seconds a step: in the worker, between the processes (pickle, msgpack), in the front end."""

    worker: float
    transport: float
    front_end: float


def measure(requests: int, drafts: int, repeats: int = 20) -> Work:
    """Medians over ROUNDS of `repeats` steps; each step verifies `drafts` drafts of `requests` requests."""
    worker = SpecDecodeWorker(None, 0, drafts, 1, False)  # type: ignore[arg-type]  # nothing is drafted here
    ids = [f"cmpl-{i:032x}-0" for i in range(requests)]
    counts = [drafts] * requests
    draft_ids = torch.randint(0, 1000, (requests * drafts,))
    starts = torch.arange(requests + 1, dtype=torch.int32) * drafts
    numbers = torch.zeros(requests)
    inputs = VerifyInputs(
        ids, counts, numbers, numbers, numbers, draft_ids, starts, numbers, numbers, numbers
    )  # fmt: skip
    block = DraftBlock(ids, draft_ids.view(requests, drafts))
    slots = torch.arange(requests * drafts)
    accepted = torch.randint(0, drafts + 1, (requests,))
    output_ids = torch.where(torch.arange(drafts + 1) <= accepted.unsqueeze(1), 1, -1).to(torch.int32)
    workloads = Workloads(16)
    labels = {request_id: workloads.label(f"w{i % 4}") for i, request_id in enumerate(ids)}
    recorder = Recorder(worker.tally, labels.__getitem__)
    worker.observers.append(recorder.on_outcome)
    worker.timing_observers.append(recorder.on_timings)

    def step() -> dict:
        worker.clock.begin_step(requests, 100 * requests)
        for stage in STAGES:
            with worker.clock.stage(stage, rows=requests):
                pass
        worker.observe(ids, counts, drafted_counts(inputs, block, slots), (output_ids >= 0).sum(dim=1))
        worker.end_step(ids)
        return recorder.take()

    step()
    delta = step()
    delta["facts"] = {}
    exporter = Exporter("m", drafts, [0])
    try:
        return Work(
            _seconds(step, repeats),
            _seconds(lambda: _there(delta), repeats),
            _seconds(lambda: exporter.add(delta, 0), repeats),
        )
    finally:
        unregister()


def _there(delta: dict) -> None:
    pickle.loads(pickle.dumps(delta))
    msgspec.msgpack.decode(msgspec.msgpack.encode(delta))


def _seconds(work: Callable[[], object], repeats: int) -> float:
    rounds = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(repeats):
            work()
        rounds.append((time.thread_time() - began) / repeats)
    return statistics.median(rounds)
