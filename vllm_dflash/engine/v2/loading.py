# SPDX-License-Identifier: Apache-2.0
"""The draft model on V2: loaded as stock loads one, sharing the target's embeddings and head."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, replace
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.worker.gpu.spec_decode.utils import get_pp_safe_draft_load_config

from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine.load_memory import enough_memory


def load_drafter(target: nn.Module, vllm_config: VllmConfig, non_causal: bool) -> DFlashDrafter:
    """The drafter with its weights. non_causal: whether a layer needs an attention backend for non-causal blocks."""
    speculative = vllm_config.speculative_config
    changes: dict[str, Any] = {
        "attention_config": replace(
            vllm_config.attention_config, use_non_causal=non_causal, backend=speculative.attention_backend
        ),
        "load_config": get_pp_safe_draft_load_config(get_draft_load_config(vllm_config)),
    }
    if speculative.kv_cache_dtype is not None:
        changes["cache_config"] = replace(vllm_config.cache_config, cache_dtype=speculative.kv_cache_dtype)
    source = speculative.draft_model_config
    with set_model_tag("dflash_head"), enough_memory(source.model, source.revision):
        drafter = get_model(vllm_config=replace(vllm_config, **changes), model_config=source)
    assert isinstance(drafter, DFlashDrafter)
    language: Any = target
    if hasattr(target, "get_language_model"):
        language = language.get_language_model()
    if not drafter.has_own_embed_tokens:
        drafter.share(embed_tokens=_embeddings(language))
    if not drafter.has_own_lm_head:
        drafter.share(lm_head=getattr(language, "lm_head", None) or target.lm_head)
    return drafter


def _embeddings(language: Any) -> nn.Module:
    """The target's input embeddings, without a LoRA adapter of the target's."""
    # MuseGlimmer's language model is the inner model already.
    inner = getattr(language, "model", language)
    found = getattr(inner, "embed_tokens", None)
    if found is None:
        found = getattr(inner, "embedding", None)
    if isinstance(found, BaseLayerWithLoRA):
        found = found.base_layer
    if found is None or isinstance(found, PPMissingLayer):
        raise ValueError(
            "The drafter shares the target's input embeddings, but this pipeline stage (the last) does not hold them: "
            "the target's embeddings and lm_head are separate, and the checkpoint ships none. Use tensor "
            "parallelism instead of pipeline parallelism, or a drafter that has its own embed_tokens."
        )
    return found
