# SPDX-License-Identifier: Apache-2.0
"""The attention backend "XFORMERS" for the drafter: stock's metadata and cache layout, our Triton kernels.

The released xformers (0.0.35) has paged attention for compute capability 8.0 and later only (its flash and split-K
operators) and for AMD's CK: on Turing, which this name is asked for on, none. So the name runs kernels of ours
everywhere. Written for cards whose own backends refuse non-causal blocks; none has run it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vllm_dflash.ops.triton.attention import paged_attention, write_rows


class XFormersImpl(TritonAttentionImpl):
    """One drafter layer: K and V of its block go into the paged cache, then attention over that."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        unsupported = {
            "ALiBi": self.alibi_slopes is not None,
            "logits soft cap": bool(self.logits_soft_cap),
            f"the cache type {self.kv_cache_dtype}": self.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            f"attention of the kind {self.attn_type}": self.attn_type != AttentionType.DECODER,
        }
        for what, present in unsupported.items():
            if present:
                raise ValueError(
                    f'"attention_backend": "XFORMERS" has no {what}. Name another backend in --speculative-config, '
                    "for example TRITON_ATTN."
                )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, nh, hd] over kv_cache [blocks, nkv, block_size, 2 * hd] into output [T, nh, hd]."""
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("XFORMERS writes its output unquantised.")
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        left = self.sliding_window[0]
        paged_attention(
            query,
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            output.view(query.shape),
            self.scale,
            bool(attn_metadata.causal),
            left + 1 if left >= 0 else None,
            attn_metadata.max_query_len,
            self.sinks,
        )
        return output


    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """key, value [T, nkv, hd] into kv_cache at slot_mapping [T]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        write_rows(key, keys, slot_mapping)
        write_rows(value, values, slot_mapping)


class XFormersBackend(TritonAttentionBackend):
    """What vLLM finds under the name that this package gives it (engine/attention_names.py)."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the enum's member up by it

    @staticmethod
    def get_impl_cls() -> type[XFormersImpl]:
        return XFormersImpl
