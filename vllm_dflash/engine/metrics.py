# SPDX-License-Identifier: Apache-2.0
"""How the metrics travel: worker -> ModelRunnerOutput -> scheduler -> SchedulerStats -> front end -> registry.

Each step's delta goes the way of the step's own output, so it is counted once whatever the number of front ends,
ranks, engines and nodes, needs no file, and an engine that starts anew just sends its first delta. Of tensor parallel
ranks the executor takes one output; of several front ends the scheduler gives its statistics to one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from vllm_dflash.engine.hooks import is_ours
from vllm_dflash.engine.v2 import scheduling
from vllm_dflash.metrics.exporter import Exporter, unregister
from vllm_dflash.metrics.recorder import Delta
from vllm_dflash.options import server_options

logger = init_logger(__name__)

KEY = "vllm_dflash"

_exporter: Exporter | None = None


def carrier(output: Any) -> Any:
    """The ModelRunnerOutput in what a model runner returns, which may complete asynchronously."""
    for name in ("_model_runner_output", "model_runner_output"):
        output = getattr(output, name, output)
    return output


def attach(output: Any, delta: Delta) -> None:
    """Puts a delta on what a model runner returns."""
    carrier(output).vllm_dflash = delta


def update_from_output(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Scheduler.update_from_output: hands the delta on with the step's statistics, and takes lengths that pay."""

    @functools.wraps(stock)
    def wrapper(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = stock(self, scheduler_output, model_runner_output)
        scheduling.learn(self, model_runner_output)
        delta = getattr(model_runner_output, "vllm_dflash", None)
        if delta:
            for one in outputs.values():
                if one.scheduler_stats is not None:
                    # The one field of plain types that travels as it is; the front end takes it out again.
                    one.scheduler_stats.kv_connector_stats = {
                        **(one.scheduler_stats.kv_connector_stats or {}),
                        KEY: delta,
                    }
                    break
        return outputs

    return wrapper


def engine_core(stock: Callable[..., Any]) -> Callable[..., Any]:
    """EngineCoreProc.__init__, after which the front end is told what runs, before the first request."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        stats = self.scheduler.make_stats()
        if stats is not None and is_ours(self.vllm_config.speculative_config):
            state = next(filter(None, self.model_executor.collective_rpc(_state)), None)
            if state is not None:
                from vllm.v1.engine import EngineCoreOutputs

                stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: state}
                self.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))

    return wrapper


def _state(worker: Any) -> Delta | None:
    """In each worker: its first delta; None from one that records nothing."""
    metrics = getattr(worker.model_runner, "vllm_dflash_metrics", None)
    return None if metrics is None else metrics.take()


def stat_logger_manager(stock: Callable[..., Any]) -> Callable[..., Any]:
    """StatLoggerManager.__init__, which also makes the exporter of a front end."""

    @functools.wraps(stock)
    def wrapper(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, vllm_config, *args, **kwargs)
        speculative = vllm_config.speculative_config
        if is_ours(speculative) and server_options(vllm_config.additional_config).metrics:
            _export(vllm_config.model_config.served_model_name, speculative.num_speculative_tokens, self.engine_indexes)

    return wrapper


def _export(model_name: str, drafts: int, engines: list[int]) -> None:
    """A front end that is set up again, e.g. for more engines, goes on with its totals."""
    global _exporter
    if _exporter is None or (_exporter.model_name, _exporter.drafts) != (model_name, drafts):
        _exporter = Exporter(model_name, drafts, engines)


def record(stock: Callable[..., Any]) -> Callable[..., Any]:
    """StatLoggerManager.record, before which the delta is taken out of the statistics and counted."""

    @functools.wraps(stock)
    def wrapper(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        carried = None if scheduler_stats is None else scheduler_stats.kv_connector_stats
        if carried and KEY in carried:
            delta = carried.pop(KEY)
            scheduler_stats.kv_connector_stats = carried or None
            if _exporter is not None:
                _count(delta, kwargs.get("engine_idx", args[2] if len(args) > 2 else None) or 0)
        stock(self, scheduler_stats, *args, **kwargs)

    return wrapper


def _count(delta: Delta, engine: int) -> None:
    """A metric that cannot be counted must not end the front end's output loop."""
    assert _exporter is not None
    try:
        _exporter.add(delta, engine)
    except Exception:
        logger.exception("dflash metrics of one step were lost")


def drop() -> None:
    """Takes the metrics out of this process's registry."""
    global _exporter
    if _exporter is not None:
        _exporter = None
        unregister()
