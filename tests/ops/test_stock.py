# SPDX-License-Identifier: Apache-2.0
"""The fused operations against the sequence of vLLM's own operations that they stand for, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops import cases, checks
from tests.ops.implementations import NAMES, implementation
from vllm_dflash import ops

stock = pytest.importorskip("vllm._custom_ops")

Rows = tuple[torch.Tensor, torch.Tensor]


def stock_context_kv(case: cases.Arguments) -> Rows:
    """The steps of vLLM's drafter after its GEMM: permuted copy, k-norm, repeated positions, RoPE, value scale.

    The k-norm is called once a layer: the CPU's kernel reads only the first row of a weight [L, hd], so that stock's
    one call gives every layer the first one's.
    """
    kv, positions = case["kv"], case["positions"]
    rows, layers, _, heads, size = kv.shape
    k, v = kv.permute(2, 1, 0, 3, 4).contiguous().unbind(0)
    normed = torch.empty_like(k)
    for layer in range(layers):
        stock.rms_norm(normed[layer], k[layer], case["k_norm"][layer], case["eps"])
    flat = normed.view(layers * rows, heads * size)
    cos_sin = case["cos_sin"].to(flat.dtype)
    stock.rotary_embedding(positions.repeat(layers), flat, None, size, cos_sin, case["is_neox"])
    return flat.view(layers, rows, heads, size), v if case["value_scale"] is None else v.mul_(case["value_scale"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_equal_stock_in_fp32(seed: int, is_neox: bool, name: str) -> None:
    case = cases.context(seed, 37, 3, 2, 64, torch.float32, is_neox)
    for got, want in zip(implementation(name).context_kv_rows(**case), stock_context_kv(case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_rows_are_nearer_than_stock_in_bf16(is_neox: bool, name: str) -> None:
    """Stock rounds after the norm, takes rounded angles, and rounds again; the fused operation rounds once."""
    case = cases.context(0, 37, 3, 2, 64, torch.bfloat16, is_neox)
    exact = ops_in_float64(case)
    (k, v), (stock_k, stock_v) = implementation(name).context_kv_rows(**case), stock_context_kv(case)
    assert torch.equal(v, stock_v)
    error, stock_error = (k.double() - exact[0]).abs().max(), (stock_k.double() - exact[0]).abs().max()
    assert error <= stock_error < 0.1
    torch.testing.assert_close(k, stock_k, rtol=0, atol=float(error + stock_error))


def ops_in_float64(case: cases.Arguments) -> Rows:
    return implementation("reference").context_kv_rows(**checks.double(case))


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="with AMX the stock cache has another layout")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "block", "isa"), [(64, 32, "vec"), (128, 128, "vec"), (80, 16, "vec16")])
@pytest.mark.parametrize("name", NAMES)
def test_the_stock_cpu_cache_can_be_written_straight(
    name: str, size: int, block: int, isa: str, dtype: torch.dtype
) -> None:
    """Keys lie as [num_blocks, nkv, hd, block_size] there: the same bits as by the stock writer, elsewhere none."""
    blocks, heads, rows = 3, 2, 20
    case = cases.context(1, rows, 1, heads, size, dtype, is_neox=True)
    slots = torch.randperm(blocks * block, generator=cases.generator(1))[:rows]
    slots[3] = -1
    ours, theirs = (torch.full((blocks, heads, block, 2 * size), 7, dtype=dtype) for _ in range(2))
    k, v = implementation(name).context_kv_rows(**case)
    key_cache, value_cache = theirs.view(blocks, heads, 2 * block, size).chunk(2, dim=2)
    stock.cpu_attn_reshape_and_cache(k[0], v[0], key_cache, value_cache, slots, isa)
    key_cache, value_cache = ours.view(blocks, heads, 2 * block, size).chunk(2, dim=2)
    key_cache = key_cache.view(blocks, heads, size, block).permute(0, 3, 1, 2)
    value_cache = value_cache.transpose(1, 2)
    implementation(name).inject_context_kv(
        **case, key_caches=[key_cache], value_caches=[value_cache], slot_mapping=slots, block_size=block,
        k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
    assert torch.equal(ours, theirs) and (ours != 7).any()


def test_the_public_operations_are_native_where_the_extension_is() -> None:
    assert ops.backend("cpu") == ("native" if len(NAMES) > 1 else "torch")
