# SPDX-License-Identifier: Apache-2.0
"""Context K/V into the paged draft cache: one operation after the GEMM where the cache's layout is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from vllm_dflash import ops
from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine.kv_layout import find_views

logger = init_logger(__name__)


@dataclass(frozen=True)
class PagedCaches:
    """The draft layers' caches as the fused operation takes them, all of one layout."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    block_size: int
    k_scale: float
    v_scale: float


class ContextWriter:
    """c -> K, V of every layer -> the cache rows that `slots` names.

    Made once the caches are bound. Where a layer's cache is laid out in a way that the fused operation can't write
    (packed for AMX, quantised in blocks, layers that differ), each layer is written by its backend's own call.
    """

    def __init__(self, drafter: DFlashDrafter, block_sizes: Sequence[int]) -> None:
        """block_sizes: a layer's tokens a block, as its block table counts them."""
        self.drafter = drafter
        self.layers = drafter.attention_layers()
        self.projection = drafter.context_projection()
        self.hidden_norm = drafter.model.hidden_norm
        self.caches = self._caches(block_sizes)
        self.folded = self.projection.folded(self.hidden_norm.weight) if self.caches is not None else None

    def _caches(self, block_sizes: Sequence[int]) -> PagedCaches | None:
        views = [find_views(layer.attn) for layer in self.layers]
        found = [view for view in views if view is not None]
        if len(found) < len(views):
            return self._layer_by_layer(f"layer {views.index(None)} has a cache layout of its backend's own")
        kinds = {(keys.shape, keys.stride(), values.stride(), keys.dtype) for keys, values in found}
        scales = {(layer.attn._k_scale_float, layer.attn._v_scale_float) for layer in self.layers}
        sizes = {*block_sizes, *(keys.shape[1] for keys, _ in found)}
        if len(kinds) > 1 or len(scales) > 1 or len(sizes) > 1:
            return self._layer_by_layer("the layers' caches differ")
        k_scale, v_scale = scales.pop()
        return PagedCaches([k for k, _ in found], [v for _, v in found], sizes.pop(), k_scale, v_scale)

    @staticmethod
    def _layer_by_layer(reason: str) -> None:
        logger.info("DFlash context rows are written layer by layer: %s.", reason)

    def refresh(self) -> None:
        """Take the drafter's new weights, if it has got any; before a captured graph is run, which writes by itself."""
        if self.projection.stale:
            self.folded = self.projection.refresh(self.folded, self.hidden_norm.weight)

    def write(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """features [T, H] after fc, positions [T] int64, slots [T] or [L, T] int64; slot -1 writes nothing."""
        caches, projection = self.caches, self.projection
        self.refresh()
        if caches is None:
            keys, values = projection(self.hidden_norm(features), positions)
            for index, layer in enumerate(self.layers):
                own = slots if slots.dim() == 1 else slots[index]
                layer.attn.impl.do_kv_cache_update(layer.attn, keys[index], values[index], layer.attn.kv_cache, own)
            return
        rotary = projection.rotary
        rest = (
            projection.k_norm, projection.eps, positions, rotary.cos_sin_cache, rotary.is_neox_style,
            projection.value_scale, caches.keys, caches.values, slots, caches.block_size,
            caches.k_scale, caches.v_scale,
        )  # fmt: skip
        if self.folded is not None:
            ops.project_context_kv(features, self.folded, None, projection.bias, *rest)
        else:
            ops.inject_context_kv(projection.project(self.hidden_norm(features)), *rest)
