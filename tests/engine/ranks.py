# SPDX-License-Identifier: Apache-2.0
"""Runs in every worker of an engine (`LLM.collective_rpc`): what each rank drafted and accepted."""

import functools
import time
from collections.abc import Sequence
from typing import Any


def watch(worker: Any) -> str:
    """From now on, notes each verification's and each walk's result. Returns the name of the rank's model runner."""
    from vllm_dflash import ops

    worker.noted = []
    for name in ("reject_sparse", "select_path"):
        operation = getattr(ops, name)

        def noting(*arguments: Any, operation: Any = operation, name: str = name) -> Any:
            result = operation(*arguments)
            worker.noted.append((name, *(tensor.tolist() for tensor in result)))
            return result

        setattr(ops, name, functools.wraps(operation)(noting))
    return f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__qualname__}"


def noted(worker: Any) -> list[tuple]:
    return worker.noted


def follow(worker: Any, patterns: Sequence[Sequence[int]] | None = None, delay: float = 0.0) -> None:
    """On V2: from now on notes each step's lengths, None where it is a dummy one, and how often the drafter ran in it.

    patterns: by rank, what its controller finds best for the i-th request of its n-th step, pattern[n + i]. delay:
    seconds that each forward of the drafter takes longer.
    """
    runner, steps = worker.model_runner, []
    worker.steps = steps
    execute_model = runner.execute_model

    def following(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            drafts = getattr(scheduler_output, "vllm_dflash_drafts", None)
            steps.append({"lengths": None if drafts is None else drafts.lengths, "forwards": 0})
        return execute_model(scheduler_output, *arguments, **options)

    def forward(module: Any, arguments: Any) -> None:
        time.sleep(delay)
        steps[-1]["forwards"] += 1

    runner.execute_model = following
    if runner.speculator is None:
        return
    runner.speculator.model.register_forward_pre_hook(forward)
    if patterns is not None:
        script_lengths(worker, patterns)


def drafter_of(worker: Any) -> Any:
    """V1's proposer or V2's speculator; None on a stage of a pipeline that does not draft."""
    runner = worker.model_runner
    return runner.speculator if hasattr(runner, "speculator") else runner.drafter


def hear_late(readback: Any, late: int) -> None:
    """As where the device is `late` steps behind the host: only then are a step's numbers there."""

    class Late:
        def record(self) -> None:
            self.there = readback._polls + late

        def query(self) -> bool:
            return readback._polls > self.there

        def synchronize(self) -> None: ...

    readback.event = Late


def spoil_context(worker: Any, row: int, late: Sequence[int]) -> None:
    """In the next step that row of the drafter's context becomes NaN. late: by rank, see `hear_late`."""
    drafter = drafter_of(worker)
    if drafter is None:
        return
    hear_late(drafter.worker._readback, late[worker.rank])
    model = drafter.model
    combine = model.combine_hidden_states

    def spoiled(taps: Any) -> Any:
        features = combine(taps)
        features[row] = float("nan")
        model.combine_hidden_states = combine
        return features

    model.combine_hidden_states = spoiled


def spoil_forward(worker: Any, ranks: Sequence[int], late: Sequence[int]) -> None:
    """From now on the drafter's forward gives NaN on these ranks. late: by rank, see `hear_late`."""
    drafter = drafter_of(worker)
    hear_late(drafter.worker._readback, late[worker.rank])
    if worker.rank in ranks:
        drafter.model.register_forward_hook(lambda module, arguments, hidden: hidden * float("nan"))


def script_lengths(worker: Any, patterns: Sequence[Sequence[int]]) -> None:
    """By rank, what its controller finds best for the i-th request of its n-th step: pattern[n + i]."""
    pattern, planned = patterns[worker.rank % len(patterns)], iter(range(1 << 60))

    def plan(request_ids: Sequence[str], context: float, requests: int | None = None) -> list[int]:
        step = next(planned)
        return [pattern[(step + i) % len(pattern)] for i in range(len(request_ids))]

    drafter_of(worker).lengths.planner.controller.plan = plan


def raise_in_forward(worker: Any, first: int, count: int) -> None:
    """The drafter's forwards number first, first + 1, ... (count of them) raise."""
    drafter = drafter_of(worker)
    if drafter is None:
        return
    calls = iter(range(1, 1 << 60))

    def raising(module: Any, arguments: Any) -> None:
        if first <= next(calls) < first + count:
            raise RuntimeError("the draft was told to fail")

    drafter.model.register_forward_pre_hook(raising)


def faults(worker: Any) -> tuple[dict[str, int], bool] | None:
    drafter = drafter_of(worker)
    if drafter is None:
        return None
    tally = drafter.worker.tally
    return dict(tally.faults), tally.enabled


def followed(worker: Any) -> list[dict[str, Any]]:
    return worker.steps


def everywhere(llm: Any, function: Any, *arguments: Any) -> list[Any]:
    """The function's answer of each rank (a probe: the engine's process asks its workers)."""
    return llm.collective_rpc(function, args=arguments)
