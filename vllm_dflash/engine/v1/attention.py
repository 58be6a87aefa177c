# SPDX-License-Identifier: Apache-2.0
"""The draft layers' KV cache groups on V1: block tables, slots, attention metadata, context writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine.context_writer import ContextWriter

NO_SLOT = -1


@dataclass(frozen=True)
class LayerGroup:
    """Draft layers of one KV cache group, backend and causality: they share block table and attention metadata.

    block_size: tokens an entry of the block table.
    """

    kv_cache_gid: int
    block_size: int
    causal: bool
    layers: list[int]
    stock: AttentionGroup
    slots: torch.Tensor


class DraftAttentionGroups:
    """All draft layers, by group. Layers with and without a window are in different KV cache groups."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        drafter: DFlashDrafter,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int] | None,
        max_rows: int,
    ) -> None:
        self.drafter = drafter
        self.layers = drafter.attention_layers()
        self.writer: ContextWriter | None = None  # made once the engine has bound the caches
        self.bound: torch.Tensor | None = None
        modules = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
        gid_of = {name: gid for gid, g in enumerate(kv_cache_config.kv_cache_groups) for name in g.layer_names}
        members: dict[tuple[int, str, bool, int | None], list[int]] = {}
        for index, layer in enumerate(self.layers):
            name = layer.attn.layer_name
            backend = modules[name].get_attn_backend().full_cls_name()
            window = drafter.draft_config.window(index)
            members.setdefault((gid_of[name], backend, layer.causal, window), []).append(index)
        self.groups = []
        for (gid, _, causal, _), indices in sorted(members.items(), key=lambda item: item[1]):
            names = [self.layers[i].attn.layer_name for i in indices]
            spec = kv_cache_config.kv_cache_groups[gid].kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[names[0]]
            stock = AttentionGroup(modules[names[0]].get_attn_backend(), names, spec, gid)
            kernel = kernel_block_sizes[gid] if kernel_block_sizes and gid < len(kernel_block_sizes) else None
            stock.create_metadata_builders(vllm_config, device, kernel_block_size=kernel)
            slots = torch.full((max_rows,), NO_SLOT, dtype=torch.int64, device=device)
            self.groups.append(LayerGroup(gid, kernel or spec.block_size, causal, indices, stock, slots))
        self.stock_groups = [group.stock for group in self.groups]

    def block_tables(self, input_batch: Any, cad: CommonAttentionMetadata) -> list[torch.Tensor]:
        """The block table [B, blocks] of each group; `cad` carries that of the first group."""
        first = self.groups[0].kv_cache_gid
        return [
            cad.block_table_tensor[: cad.num_reqs]
            if group.kv_cache_gid == first
            else input_batch.block_table[group.kv_cache_gid].get_device_tensor(cad.num_reqs)
            for group in self.groups
        ]

    def longest_group(self, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
        """(id, tokens a block of the scheduler's) of the group that keeps most of a sequence: one without a window."""
        has_window = [getattr(group.stock.kv_cache_spec, "sliding_window", None) is not None for group in self.groups]
        first = self.groups[has_window.index(min(has_window))]
        return first.kv_cache_gid, kv_cache_config.kv_cache_groups[first.kv_cache_gid].kv_cache_spec.block_size

    def attendable_from(self, start: int) -> int:
        """The first position that is attended where context is written from `start` on: whole blocks are left out."""
        return max(-(-start // group.block_size) * group.block_size for group in self.groups)

    def write_context(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        request_of: torch.Tensor,
        valid: torch.Tensor | None,
        tables: list[torch.Tensor],
    ) -> None:
        """features [T, H] (after fc) at positions [T] of requests [T] become K and V in the paged caches, valid rows
        only."""
        slots = [_slots(t, request_of, positions, g.block_size) for g, t in zip(self.groups, tables, strict=True)]
        if valid is not None:
            slots = [slot.masked_fill(~valid, NO_SLOT) for slot in slots]
        self.write_slots(features, positions, slots)

    def write_slots(self, features: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]) -> None:
        """The same at slots that are known, [T] int64 a group."""
        bound = self.layers[0].attn.kv_cache
        if self.writer is None or self.bound is not bound:
            sizes = {index: group.block_size for group in self.groups for index in group.layers}
            self.writer, self.bound = ContextWriter(self.drafter, [sizes[i] for i in range(len(sizes))]), bound
        if len(slots) > 1:
            of_layer = {index: slot for group, slot in zip(self.groups, slots, strict=True) for index in group.layers}
            mapping = torch.stack([of_layer[index] for index in range(len(of_layer))])
        else:
            mapping = slots[0]
        self.writer.write(features, positions, mapping)

    def block_metadata(
        self,
        context_lens: torch.Tensor,
        positions: torch.Tensor,
        tables: list[torch.Tensor],
        block: int,
        max_seq_len: int,
        seq_lens_bound: torch.Tensor | None,
        limit: int,
        padded_rows: int,
        context_starts: list[int] | None = None,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata and slots by layer name for B blocks of `block` rows after context_lens [B] tokens.

        seq_lens_bound [B]: context_lens on the host, or more. positions [B * block]: rows at or past `limit` own no
        slot: they write nothing and are seen by nobody. context_starts: B positions before which nothing is attended
        (None: all of the context is). K carries its rotation, so that the blocks before can be left out of the table.
        """
        count, rows = context_lens.shape[0], positions.shape[0]
        starts = torch.arange(0, rows + 1, block, dtype=torch.int32)
        request_of = torch.arange(count, device=positions.device).repeat_interleave(block, output_size=rows)
        seq_lens = (context_lens + block).clamp(max=limit).to(torch.int32)
        bound = None if seq_lens_bound is None else (seq_lens_bound + block).clamp(max=limit)
        metadata: dict[str, Any] = {}
        by_layer: dict[str, torch.Tensor] = {}
        for group, table in zip(self.groups, tables, strict=True):
            last = table.shape[1] * group.block_size - 1
            slots = _slots(table, request_of, positions.clamp(max=last), group.block_size)
            group.slots[:rows].copy_(slots.masked_fill_(positions >= limit, NO_SLOT))
            group.slots[rows:padded_rows].fill_(NO_SLOT)
            lens, upper, longest = seq_lens, bound, min(max_seq_len + block, limit)
            if context_starts is not None:
                left_out = torch.tensor([-(-start // group.block_size) for start in context_starts])
                if upper is not None:
                    upper = upper - left_out * group.block_size
                left_out = left_out.to(table.device, non_blocking=True)
                lens = lens - (left_out * group.block_size).to(torch.int32)
                entries = torch.arange(table.shape[1], device=table.device) + left_out.unsqueeze(1)
                table = table.gather(1, entries.clamp(max=table.shape[1] - 1))
            built = group.stock.build_metadata_for_drafting(
                CommonAttentionMetadata(
                    query_start_loc=starts.to(positions.device, non_blocking=True),
                    query_start_loc_cpu=starts,
                    seq_lens=lens,
                    num_reqs=count,
                    num_actual_tokens=rows,
                    max_query_len=block,
                    max_seq_len=longest,
                    seq_lens_cpu_upper_bound=upper,
                    block_table_tensor=table,
                    slot_mapping=group.slots[:rows],
                    causal=group.causal,
                ),
                draft_index=0,
            )
            if not group.causal and getattr(built, "causal", False) is not False:
                raise ValueError(
                    f"Attention backend {group.stock.backend.get_name()} ignored the drafter's non-causal blocks. "
                    'Name one that supports them with "attention_backend" in --speculative-config.'
                )
            for index in group.layers:
                name = self.layers[index].attn.layer_name
                metadata[name] = built
                by_layer[name] = group.slots[:padded_rows]
        return metadata, by_layer


def _slots(table: torch.Tensor, request_of: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots [T] int64 of positions [T] of requests [T] in a block table [B, blocks]."""
    blocks = table[request_of, positions // block_size].to(torch.int64)
    return blocks * block_size + positions % block_size
