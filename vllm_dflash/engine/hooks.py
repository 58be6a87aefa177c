# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's own calls: functions from stock's to ours. Heavy imports wait until a hook has work to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_dflash.engine import activation, http_requests
from vllm_dflash.engine.seams import ARCHITECTURES


def is_ours(speculative_config: Any) -> bool:
    """Whether a built SpeculativeConfig is one that this package serves."""
    if speculative_config is None or speculative_config.method != "dflash":
        return False
    draft = getattr(speculative_config, "draft_model_config", None)
    return draft is not None and bool(set(draft.architectures or ()) & set(ARCHITECTURES))


def create_speculative_config(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapper(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        from vllm_dflash.engine import attention_names, configuration

        request = configuration.asked_for(self)
        if request is None:
            activation.deactivate()
            return stock(self, target_model_config, target_parallel_config)
        draft = configuration.resolve(request, target_model_config)
        if draft is None:
            activation.deactivate()
            return stock(self, target_model_config, target_parallel_config)
        activation.activate("config")
        http_requests.widen()
        self.speculative_config = attention_names.resolve(configuration.with_defaults(request, draft))
        built = stock(self, target_model_config, target_parallel_config)
        configuration.complete(built, draft)
        configuration.require_block_length(request.options, built.num_speculative_tokens)
        built.vllm_dflash = activation.Passport(attention_names.is_registered())
        return built

    return wrapper


def init_device(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapper(self: Any) -> Any:
        config = self.vllm_config
        if is_ours(config.speculative_config):
            if self.global_rank == 0:
                _warn_of_limits(config)
            activation.activate("worker", runner="v2" if config.use_v2_model_runner else "v1")
        else:
            activation.deactivate()
        return stock(self)

    return wrapper


def _warn_of_limits(config: Any) -> None:
    from vllm.logger import init_logger

    from vllm_dflash.engine import limits

    for warning in limits.warnings(config):
        init_logger(__name__).warning("%s", warning)


def v1_unsupported_features(stock: Callable[..., list[str]]) -> Callable[..., list[str]]:
    served = ("DFlash candidate-head drafts", "mixed sliding/full dflash drafts")

    @functools.wraps(stock)
    def wrapper(self: Any) -> list[str]:
        features = stock(self)
        if not is_ours(self.speculative_config):
            return features
        features = [feature for feature in features if feature not in served]
        if self.parallel_config.pipeline_parallel_size > 1:
            # Its stages hand no tapped layers on, and its first stage asks for a drafter that only the last one has.
            features.append(
                "DFlash under pipeline parallelism (it does not carry the tapped layers from stage to stage; use "
                "tensor parallelism, or V2 where Triton works)"
            )
        return features

    return wrapper


def v2_unsupported_features(stock: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(stock)
    def wrapper(self: Any) -> list[str]:
        features = stock(self)
        stages = self.parallel_config.pipeline_parallel_size
        # None: not decided yet.
        if is_ours(self.speculative_config) and stages > 1 and self.scheduler_config.async_scheduling is False:
            features.append(
                "DFlash under pipeline parallelism without asynchronous scheduling (the scheduler gets the drafts of "
                "a step that is still on its way, and the next one fails; leave out --no-async-scheduling, or use "
                "tensor parallelism)"
            )
        return features

    return wrapper
