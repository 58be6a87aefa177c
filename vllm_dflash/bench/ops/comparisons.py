# SPDX-License-Identifier: Apache-2.0
"""The operations at the shapes of the Qwen3-8B and Qwen3.8-27B drafters, with inputs and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vllm_dflash import ops
from vllm_dflash.bench.ops import stock
from vllm_dflash.bench.ops.measure import Comparison

LAYERS, HEADS, SIZE = 5, 8, 128  # of both drafters
BF16 = torch.bfloat16


def context(rows: int) -> Iterator[Comparison]:
    """From the GEMM's result to K and V: as rows, in paged caches of vLLM's GPU layout (stock only up to its cache
    writes), and in the CPU's own caches."""
    kv = torch.randn(rows, LAYERS, 2, HEADS, SIZE).to(BF16)
    k_norm = torch.ones(LAYERS, SIZE, dtype=BF16)
    positions = torch.arange(rows)
    angle = positions[:, None] * 1e6 ** (-torch.arange(0, SIZE, 2) / SIZE)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(BF16)
    block = 32
    blocks = rows // block + 2
    slots = torch.arange(rows) + block // 2
    shape = f"{rows} rows, {LAYERS} layers, {HEADS} heads of {SIZE}, bf16"
    moved = 2 * kv.numel() * kv.element_size()

    def inject(keys: list[torch.Tensor], values: list[torch.Tensor]) -> Callable[[], None]:
        return lambda: ops.inject_context_kv(
            kv, k_norm, 1e-6, positions, cos_sin, True, None, keys, values, slots, block, 1.0, 1.0
        )

    def stock_rows() -> tuple[torch.Tensor, torch.Tensor]:
        return stock.context_kv(kv, k_norm, 1e-6, positions, cos_sin)

    yield Comparison(
        "context_kv_rows",
        shape,
        lambda: ops.context_kv_rows(kv, k_norm, 1e-6, positions, cos_sin, True, None),
        stock_rows,
        moved,
    )
    plain = [torch.zeros(2, blocks, block, HEADS, SIZE, dtype=BF16) for _ in range(LAYERS)]
    written = inject([cache[0] for cache in plain], [cache[1] for cache in plain])
    yield Comparison(
        "inject_context_kv", f"{shape}, into paged caches; stock before its writes", written, stock_rows, moved
    )
    if torch.cpu._is_amx_tile_supported():
        return
    caches = [torch.zeros(blocks, HEADS, block, 2 * SIZE, dtype=BF16) for _ in range(LAYERS)]
    sides = [cache.view(blocks, HEADS, 2 * block, SIZE).chunk(2, dim=2) for cache in caches]
    keys = [k.view(blocks, HEADS, SIZE, block).permute(0, 3, 1, 2) for k, _ in sides]
    values = [v.transpose(1, 2) for _, v in sides]

    def stock_written() -> None:
        stock.write_caches(*stock_rows(), caches, slots, "vec")

    yield Comparison(
        "inject_context_kv", f"{shape}, into the CPU's caches; stock too", inject(keys, values), stock_written, moved
    )


def convolution(requests: int, block: int, width: int) -> Comparison:
    x = torch.randn(requests * block, width).to(BF16)
    dynamic = torch.randn(requests * block, 2, 2, width // 16).to(BF16)[:, 0]
    base = torch.randn(2, width).to(BF16)
    return Comparison(
        "grouped_convolution",
        f"{requests} blocks of {block}, H {width}, groups of 16, bf16",
        lambda: ops.grouped_convolution(x, dynamic, base, block),
        lambda: stock.convolution(x, dynamic, base, block),
        2 * x.numel() * 2 + dynamic.numel() * 2,
    )


def path(requests: int, slots: int, vocabulary: int, width: int = 16, rank: int = 256) -> Comparison:
    ids = torch.randint(vocabulary, (requests, slots, width))
    logits = torch.randn(requests, slots, width)
    projected = torch.randn(requests, slots, rank).to(BF16)
    predecessor, successor = (torch.randn(vocabulary, rank).to(BF16) for _ in range(2))
    anchors = torch.randint(vocabulary, (requests,))
    greedy, key = torch.zeros(requests), torch.arange(requests)
    return Comparison(
        "select_path",
        f"{requests} requests, K {slots}, C {width}, R {rank}, V {vocabulary}, bf16",
        lambda: ops.select_path(ids, logits, projected, predecessor, successor, anchors, greedy, key, key),
        lambda: stock.lattice_path(ids, logits, projected, predecessor, successor, anchors),
        requests * slots * ((width + 2) * rank * 2 + 16 * width),
    )


def rejection(requests: int, slots: int, vocabulary: int, accepts: bool, width: int = 16) -> Iterator[Comparison]:
    """T = 1. accepts: q so small at the drafts that all are accepted, which makes the operation read every row; else
    q is near p and the reading stops at the first rejection, as in service."""
    drafts = requests * slots
    rows = torch.arange(drafts + requests).view(requests, slots + 1)
    draft_rows, bonus_rows = rows[:, :slots].reshape(-1), rows[:, slots].contiguous()
    logits = torch.randn(drafts + requests, vocabulary)
    ids = torch.stack([torch.randperm(vocabulary)[:width] for _ in range(drafts)])
    logits[draft_rows[:, None], ids] += 12 + torch.randn(drafts, width)
    scores = logits[draft_rows[:, None], ids] + torch.randn(drafts, width) * 0.4
    if accepts:
        scores[:, 0] = -40.0
    chosen = torch.zeros(drafts, 1, dtype=torch.int64) if accepts else scores.softmax(-1).multinomial(1)
    draft_ids = ids.gather(1, chosen)[:, 0]
    q = torch.zeros(drafts, vocabulary).scatter_(1, ids, scores.softmax(-1))
    ends, key = (torch.arange(requests + 1) * slots).to(torch.int32), torch.arange(requests)
    temperature, narrow = torch.ones(requests), draft_ids.to(torch.int32)
    sparse, dense = drafts * width * 12, drafts * vocabulary * 4
    copied = logits[draft_rows]

    def ours(of: torch.Tensor) -> torch.Tensor:
        return ops.reject_sparse(
            of, draft_rows, bonus_rows, draft_ids, ends, ids, scores, temperature, key, key, slots
        )[1]

    kept = ours(logits).float().mean()
    shape = (
        f"{requests} requests, K {slots}, V {vocabulary}, {kept:.1f} accepted, q {sparse / 1e3:.0f} kB"
        f" for {dense / 1e6:.0f} MB"
    )
    moved = int((ours(logits) + 1).sum()) * vocabulary
    half = logits.to(BF16)
    yield Comparison(
        "reject_sparse",
        f"{shape}, fp32, stock with its copy of the logits",
        lambda: ours(logits),
        lambda: stock.dense_rejection(logits, draft_rows, narrow, q, requests),
        moved * 4,
    )
    yield Comparison(
        "reject_sparse",
        f"{shape}, fp32, stock without",
        lambda: ours(logits),
        lambda: stock.dense_rejection(copied, None, narrow, q, requests),
        moved * 4,
    )
    yield Comparison(
        "reject_sparse",
        f"{shape}, bf16",
        lambda: ours(half),
        lambda: stock.dense_rejection(half, draft_rows, narrow, q, requests),
        moved * 2,
    )


def all_comparisons() -> Iterator[Comparison]:
    """One after the other, so that only one's inputs are in memory."""
    torch.manual_seed(0)
    for rows in (8, 64, 2048):
        yield from context(rows)
    yield convolution(requests=32, block=8, width=5120)
    yield path(requests=1, slots=7, vocabulary=248_320)
    yield path(requests=32, slots=7, vocabulary=248_320)
    for accepts in (False, True):
        yield from rejection(requests=32, slots=7, vocabulary=151_936, accepts=accepts)
    yield from rejection(requests=1, slots=7, vocabulary=248_320, accepts=False)
