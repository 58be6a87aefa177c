# SPDX-License-Identifier: Apache-2.0
"""Where a step of the V2 runner and its stages begin and end, for the clock, the observers and the metrics.

A draft step that is one CUDA graph is one stage, "draft": its context rows and its path are inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu.async_utils import StepTimingCollector

from vllm_dflash.engine.metrics import carrier
from vllm_dflash.engine.v2.metrics import V2Metrics
from vllm_dflash.engine.worker_metrics import wanted
from vllm_dflash.spec_decode import SpecDecodeWorker, StageClock

# The runner's own requests, which warm its kernels up.
WARM_UP = ("_warmup", "_v2_mixed_warmup")


class StepMarks(StepTimingCollector):
    """Stock's marks in a step, which also open the stage "target". begin: called with the batch of a new step."""

    def __init__(self, clock: StageClock, begin: Callable[[Any], None]) -> None:
        super().__init__()
        self.clock = clock
        self.begin = begin
        self.live = False
        self._rows = 0
        self._target: Any = None

    def record_batch(self, input_batch: Any, full_cudagraph: bool) -> None:
        super().record_batch(input_batch, full_cudagraph)
        if self.live:
            self._rows = input_batch.num_tokens
            self.clock.begin_step(input_batch.num_reqs, int(input_batch.num_computed_tokens_np.sum()))
            self.begin(input_batch)

    def forward_start(self) -> None:
        super().forward_start()
        if self.live:
            self._target = self.clock.stage("target", rows=self._rows)
            self._target.__enter__()

    def end_target(self) -> None:
        """After the logits of the rows to verify; again is harmless."""
        if self._target is not None:
            self._target.__exit__(None, None, None)
            self._target = None


class DraftStages:
    """The stages of one draft step, one behind the other. Between steps, and so under capture, it does nothing."""

    def __init__(self, clock: StageClock) -> None:
        self.clock = clock
        self._open: Any = None

    def begin(self, rows: int) -> None:
        self._start("inject", rows)

    def next(self, stage: str, rows: int) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._start(stage, rows)

    def end(self, drafted: bool) -> None:
        if self._open is not None:
            if drafted and self._open.name == "inject":
                self._open.name = "draft"
            self._open.__exit__(None, None, None)
            self._open = None

    def abandon(self) -> None:
        """The step failed: the stage that is open did not come to its end."""
        self._open = None

    def _start(self, stage: str, rows: int) -> None:
        self._open = self.clock.stage(stage, rows=rows)
        self._open.__enter__()


def worker_of(runner: Any) -> SpecDecodeWorker | None:
    """The worker of a runner that drafts with us, once its drafter is loaded."""
    return getattr(getattr(runner, "speculator", None), "worker", None)


def execute_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner.execute_model, where a step begins."""

    @functools.wraps(stock)
    def wrapper(
        self: Any, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False, **kwargs: Any
    ) -> Any:
        worker = worker_of(self)
        if worker is not None:
            if not isinstance(self.step_timing, StepMarks):
                _watch(self, worker)
            self.speculator.drafts = getattr(scheduler_output, "vllm_dflash_drafts", None)
            live = self.step_timing.live = not dummy_run and not _warms_up(scheduler_output)
            worker.clock.paused = not live
            if live:
                worker.tally.restored_context += self.speculator.follow(scheduler_output)
                if self.vllm_dflash_metrics is not None:
                    self.vllm_dflash_metrics.follow(scheduler_output)
        return stock(self, scheduler_output, intermediate_tensors, dummy_run, **kwargs)

    return wrapper


def _watch(runner: Any, worker: SpecDecodeWorker) -> None:
    runner.step_timing = StepMarks(worker.clock, runner.speculator.begin_step)
    runner.vllm_dflash_metrics = V2Metrics(runner, worker) if wanted(runner.vllm_config) else None
    if runner.rejection_sampler is not None:
        runner.rejection_sampler.marks = runner.step_timing


def _warms_up(scheduler_output: Any) -> bool:
    first = next(iter(scheduler_output.num_scheduled_tokens), "")
    return first.startswith(WARM_UP)


def sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner.sample, whose numbers of sampled tokens are kept for the step's end."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampled = stock(self, *args, **kwargs)
        if isinstance(self.step_timing, StepMarks):
            self.step_timing.end_target()
            self.vllm_dflash_num_sampled = sampled[1]
        return sampled

    return wrapper


def sample_tokens(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner.sample_tokens, after which the step has ended and its metrics go with its output."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        worker, state = worker_of(self), self.execute_model_state
        output = stock(self, *args, **kwargs)
        marks = self.step_timing
        if worker is None or state is None or not self.is_last_pp_rank or not getattr(marks, "live", False):
            return output
        marks.live = False
        batch = state.input_batch
        if batch.num_draft_tokens_per_req is not None:
            counts = batch.num_draft_tokens_per_req[: batch.num_reqs].tolist()
            worker.observe(batch.req_ids, counts, None, self.vllm_dflash_num_sampled[: batch.num_reqs])
        prefilling = batch.is_prefilling_np[: batch.num_reqs].tolist()
        worker.end_step([id for id, unfinished in zip(batch.req_ids, prefilling, strict=True) if not unfinished])
        carrier(output).vllm_dflash_lengths = self.speculator.next_lengths(batch, self.req_states.req_id_to_index)
        if self.vllm_dflash_metrics is not None:
            self.vllm_dflash_metrics.hand_over(output)
        return output

    return wrapper
