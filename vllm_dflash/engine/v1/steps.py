# SPDX-License-Identifier: Apache-2.0
"""Where a step of the V1 runner begins and ends, for the clock and the observers of the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_dflash.engine.v1.step_batch import StepBatch, step_batch
from vllm_dflash.spec_decode import SpecDecodeWorker


def worker_of(runner: Any) -> SpecDecodeWorker | None:
    """The worker of a runner that drafts with us, once its drafter is loaded."""
    return getattr(getattr(runner, "drafter", None), "worker", None)


def model_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner._model_forward, where a step and its stage "target" begin."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        worker = worker_of(self)
        if worker is not None:
            batch = self.drafter.batch = step_batch(self)
            worker.clock.begin_step(len(batch.computed), sum(batch.computed))
            ids = args[0] if args else kwargs.get("input_ids")
            if ids is None:
                ids = kwargs.get("inputs_embeds")
            self.vllm_dflash_target = worker.clock.stage("target", rows=0 if ids is None else ids.shape[0])
            self.vllm_dflash_target.__enter__()
        return stock(self, *args, **kwargs)

    return wrapper


def execute_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner.execute_model, where the stage "target" ends: the logits of its rows are part of it."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.vllm_dflash_target = None
        output = stock(self, *args, **kwargs)
        if self.vllm_dflash_target is not None:
            self.vllm_dflash_target.__exit__(None, None, None)
        return output

    return wrapper


def sample_tokens(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner.sample_tokens, after which the step has ended and its metrics go with its output."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        worker = worker_of(self)
        # Taken before, as the step empties it.
        state = self.execute_model_state
        decoding = [] if worker is None or state is None else _decoding(self, state.scheduler_output)
        output = stock(self, *args, **kwargs)
        if worker is not None and state is not None:
            worker.end_step(decoding)
            if self.vllm_dflash_metrics is not None:
                self.vllm_dflash_metrics.hand_over(output)
        return output

    return wrapper


def _decoding(runner: Any, scheduler_output: Any) -> list[str]:
    """Requests of this step whose prompt was computed before it, and that have one row beside their drafts.

    A request that comes back from a preemption and computes its tokens anew is none.
    """
    batch = runner.input_batch
    drafts = scheduler_output.scheduled_spec_decode_tokens
    scheduled = scheduler_output.num_scheduled_tokens
    before: StepBatch = runner.drafter.batch
    if before.past_prompts and scheduler_output.total_num_scheduled_tokens == len(before.computed):
        return list(batch.req_ids)
    return [
        request_id
        for request_id, computed, prompt in zip(
            batch.req_ids, before.computed, batch.num_prompt_tokens[: batch.num_reqs].tolist(), strict=True
        )
        if computed >= prompt and scheduled[request_id] - len(drafts.get(request_id, ())) == 1
    ]
