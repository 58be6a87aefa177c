# SPDX-License-Identifier: Apache-2.0
"""The Triton operations in Triton's interpreter, over the cases and checks of the other implementations. test_triton.py
runs this file with TRITON_INTERPRET=1, which Triton reads when it is imported."""

from __future__ import annotations

import pytest
import torch
import triton as stock
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops import cases, checks
from tests.support.v2_on_cpu.interpreter_backend import accept_integer_masks, widen_bfloat16_in_dots
from vllm_dflash.ops import noise, triton
from vllm_dflash.ops.reference import selector
from vllm_dflash.ops.triton.attention import paged_attention, write_rows
from vllm_dflash.ops.triton.device import uniform

accept_integer_masks()
widen_bfloat16_in_dots()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 1 << 30)
few = settings(deadline=None, max_examples=6, phases=[Phase.explicit, Phase.generate], derandomize=True)


@stock.jit
def noise_kernel(seeds, positions, out, slot, stream, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, uniform(tl.load(seeds + i), tl.load(positions + i), slot, stream))


def test_noise_is_the_same_to_the_bit() -> None:
    rng = cases.generator(0)
    seeds = cases.integers(rng, -(1 << 62), 1 << 62, 1024) * 2 + 1
    positions = cases.integers(rng, 0, 1 << 40, 1024)
    for slot in (1, 7, 15):
        for stream in (noise.DRAFT, noise.ACCEPT, noise.RECOVER, noise.BONUS):
            out = torch.empty(1024, dtype=torch.float64)
            noise_kernel[(1,)](seeds, positions, out, slot, stream, 1024)
            assert torch.equal(out, noise.uniform(seeds, positions, slot, stream))


@few
@given(SEEDS, st.integers(0, 5), st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 3, 16, 200]), DTYPES)
def test_convolution(seed: int, blocks: int, block: int, groups: int, size: int, dtype: torch.dtype) -> None:
    case = cases.convolution(seed, blocks, block, groups, size, 1 + seed % 4, dtype)
    checks.check_convolution(triton.grouped_convolution, case)


def test_convolution_under_torch_compile() -> None:
    case = cases.convolution(1, blocks=2, block=4, groups=2, size=8, taps=2, dtype=torch.float32)
    compiled = torch.compile(lambda: triton.grouped_convolution(**case), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), triton.grouped_convolution(**case))


@few
@given(SEEDS, st.integers(0, 6), st.integers(1, 5), st.integers(1, 20), st.sampled_from([1, 5, 64, 600]), DTYPES)
def test_path(seed: int, batch: int, slots: int, candidates: int, rank: int, dtype: torch.dtype) -> None:
    checks.check_path(triton.select_path, cases.path(seed, batch, slots, candidates, rank, 40, dtype))


def test_path_without_finite_scores() -> None:
    checks.check_path_without_finite_scores(triton.select_path)


def test_path_without_selector() -> None:
    """A rank of zero: the slots are independent."""
    case = cases.path(3, batch=4, slots=3, candidates=5, rank=1, vocabulary=40, dtype=torch.float32)
    case |= {name: case[name][..., :0] for name in ("projected", "predecessor", "successor")}
    for got, want in zip(triton.select_path(**case), selector.select_path(**case), strict=True):
        torch.testing.assert_close(got, want)


@few
@given(SEEDS, st.lists(st.integers(0, 6), max_size=4), st.sampled_from([1, 7, 300, 9000]), st.integers(1, 9), DTYPES)
def test_rejection(seed: int, counts: list[int], vocabulary: int, candidates: int, dtype: torch.dtype) -> None:
    case = cases.rejection(seed, counts, vocabulary, candidates, dtype)
    checks.check_rejection(triton.reject_sparse, case)


def test_rejection_of_odd_rows() -> None:
    checks.check_rejection_of_odd_rows(triton.reject_sparse)


@pytest.mark.parametrize("vocabulary", [300, 9000])
def test_rejection_with_a_one_hot_q(vocabulary: int) -> None:
    """Drafts that are no candidate, and candidates that hold all of p: nothing of it may be drawn after a rejection."""
    for width in (1, 3):
        case = cases.rejection(vocabulary, [2, 1, 3], vocabulary, 3, torch.float32)
        case["temperature"][:] = 1.0
        n = case["draft_ids"].shape[0]
        case["candidate_ids"] = torch.full((n, width), -1)
        case["candidate_scores"] = torch.zeros(n, width)
        checks.check_rejection(triton.reject_sparse, case)


@few
@given(SEEDS, st.integers(0, 40), st.integers(1, 3), st.sampled_from([8, 32, 80, 96, 128, 256]), DTYPES, st.booleans())
def test_context_rows(seed: int, rows: int, layers: int, size: int, dtype: torch.dtype, is_neox: bool) -> None:
    case = cases.context(seed, rows, layers, 1 + seed % 3, size, dtype, is_neox, [size, size // 2][seed % 2])
    checks.check_context_rows(triton.context_kv_rows, case)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@few
@given(SEEDS, st.integers(0, 20), st.booleans())
def test_injection(layout: str, dtype: torch.dtype, seed: int, rows: int, per_layer: bool) -> None:
    case, keys, values = cases.injection(seed, rows, dtype, layout, per_layer, size=[16, 128][seed % 2])
    checks.check_injection(triton.inject_context_kv, case, keys, values)


@pytest.mark.parametrize("weight", ["dense", "fp8", "int8"])
@few
@given(SEEDS, st.integers(0, 70), st.sampled_from([16, 64, 96, 128]), DTYPES)
def test_projection(weight: str, seed: int, rows: int, size: int, dtype: torch.dtype) -> None:
    """The features stay in their type and the sums in fp32: only the cache's rounding is left."""
    case = cases.projection(seed, rows, 2, 1, size, [32, 200][seed % 2], dtype, weight)
    keys, values = cases.caches(seed, 2, 20, 4, 1, size, dtype, "HND")
    case |= {"slot_mapping": torch.randperm(80, generator=cases.generator(seed))[:rows] - 1, "block_size": 4}
    checks.check_projection(triton.project_context_kv, case, keys, values, rounding=0.0)


def test_conversions() -> None:
    checks.check_conversions(triton.inject_context_kv)


def dense_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, window: int | None, sinks: torch.Tensor
) -> torch.Tensor:
    """The last rows of a sequence over all of it, in float64. query [n, nh, hd], keys and values [length, nkv, hd]."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.3
    distance = torch.arange(len(keys))[len(keys) - len(query) :, None] - torch.arange(len(keys))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance.abs() >= window
    sink = sinks.double()[:, None, None].expand(-1, len(query), 1)
    scores = torch.cat([scores.masked_fill(hidden, -torch.inf), sink], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], values)


@settings(deadline=None, max_examples=24, phases=[Phase.explicit, Phase.generate], derandomize=True)
@given(
    SEEDS,
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 150)), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3)]),
    st.sampled_from([16, 64, 80]),
    st.sampled_from([1, 4, 16, 32]),
    st.booleans(),
    st.sampled_from([None, 1, 5, 24, 200]),
    DTYPES,
    st.booleans(),
)
def test_attention(
    seed: int,
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    block: int,
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    with_sinks: bool,
) -> None:
    """Every mask against a dense oracle: GQA, windows, block sizes, ragged batches, requests without rows, padding."""
    rng = cases.generator(seed)
    rows = [n for n, _ in requests]
    lengths = [n + before for n, before in requests]
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    padding = 3
    query = cases.normal(rng, sum(rows) + padding, heads[0], size, dtype=dtype)
    width = max(-(-length // block) for length in lengths) + 1
    table = torch.randperm(len(requests) * width + 2, generator=rng)[: len(requests) * width].view(-1, width).int()
    cache = cases.normal(rng, int(table.max()) + 1, heads[1], block, 2 * size, dtype=dtype)
    keys, values = cache.transpose(1, 2).chunk(2, -1)
    sinks = cases.normal(rng, heads[0]) if with_sinks else torch.full((heads[0],), -torch.inf)
    out = torch.full_like(query, 7.0)
    paged_attention(
        query, keys, values, table, torch.tensor(lengths, dtype=torch.int32), starts, out, 0.3, causal, window,
        max(rows), sinks if with_sinks else None,
    )  # fmt: skip
    assert (out[sum(rows) :] == 7).all(), "padded rows are not written"
    for r, length in enumerate(lengths):
        at = torch.arange(length)
        slots = table[r, at // block].long(), at % block
        mine = slice(int(starts[r]), int(starts[r + 1]))
        want = dense_attention(query[mine], keys[slots], values[slots], causal, window, sinks)
        tolerance = 1e-5 if dtype == torch.float32 else 4 * checks.ONE_ROUNDING[dtype]
        torch.testing.assert_close(out[mine].double(), want, rtol=tolerance, atol=tolerance)


def test_cache_rows() -> None:
    rng = cases.generator(4)
    for heads, size, dtype in ((1, 16, torch.float32), (3, 80, torch.bfloat16)):
        cache = torch.full((4, heads, 8, 2 * size), 7.0, dtype=dtype)
        want = cache.clone()
        _, values = cache.transpose(1, 2).chunk(2, -1)
        rows = cases.normal(rng, 9, heads, size, dtype=dtype)
        slots = torch.tensor([0, 31, -1, 8, 15, 16])  # fewer than the rows: what is left is padding
        write_rows(rows, values, slots)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[slot // 8, :, slot % 8, size:] = rows[row]
        assert torch.equal(cache, want)
