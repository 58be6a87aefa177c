# SPDX-License-Identifier: Apache-2.0
"""What stands at each seam: functions from stock's object to ours. Heavy imports wait until a seam is applied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Draft architectures that the package serves, as vLLM's registry names them after its own renaming.
ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "MuseGlimmerAssistantModel",
    "DFlashMuseGlimmerAssistantModel",
)


def is_ours(speculative_config: Any) -> bool:
    """Whether a built SpeculativeConfig is one that this package serves."""
    if speculative_config is None or speculative_config.method != "dflash":
        return False
    draft = getattr(speculative_config, "draft_model_config", None)
    return draft is not None and bool(set(draft.architectures or ()) & set(ARCHITECTURES))


def create_speculative_config(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapper(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        from vllm_dflash.engine import activation, configuration

        request = configuration.asked_for(self)
        if request is None:
            activation.deactivate()
            return stock(self, target_model_config, target_parallel_config)
        draft = configuration.resolve(request, target_model_config)
        if draft is None:
            activation.deactivate()
            return stock(self, target_model_config, target_parallel_config)
        activation.activate("config")
        self.speculative_config = configuration.with_defaults(request, draft)
        built = stock(self, target_model_config, target_parallel_config)
        configuration.complete(built, draft)
        built.vllm_dflash = activation.Passport()
        return built

    return wrapper


def init_device(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapper(self: Any) -> Any:
        from vllm_dflash.engine import activation

        config = self.vllm_config
        # The V2 runner has stock's own drafter and speculator, which belong together.
        if is_ours(config.speculative_config) and not config.use_v2_model_runner:
            activation.activate("worker")
        else:
            activation.deactivate()
        return stock(self)

    return wrapper


def v1_unsupported_features(stock: Callable[..., list[str]]) -> Callable[..., list[str]]:
    served = ("DFlash candidate-head drafts", "mixed sliding/full dflash drafts")

    @functools.wraps(stock)
    def wrapper(self: Any) -> list[str]:
        features = stock(self)
        return [f for f in features if f not in served] if is_ours(self.speculative_config) else features

    return wrapper


def v1_proposer(stock: type) -> type:
    from vllm_dflash.engine.v1.proposer import Proposer

    assert issubclass(Proposer, stock)
    return Proposer


def v1_rejection_sampler(stock: type) -> type:
    from vllm_dflash.engine.v1.sampler import SparseRejectionSampler

    assert issubclass(SparseRejectionSampler, stock)
    return SparseRejectionSampler
