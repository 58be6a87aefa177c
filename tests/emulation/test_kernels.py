# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, run on the CPU, over the same cases and checks as the other implementations; with the
threads and the blocks in three orders, since a missing barrier shows only in some."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulation.build import emulated
from tests.ops import cases, checks

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 1 << 30)
few = settings(deadline=None, max_examples=12)


@pytest.fixture(params=["forward", "reverse", "shuffled"], autouse=True, scope="module")
def order(request: pytest.FixtureRequest) -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("DFLASH_EMULATION_ORDER", request.param)
    yield
    patch.undo()


@few
@given(SEEDS, st.integers(0, 5), st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 3, 16]), DTYPES)
def test_convolution(seed: int, blocks: int, block: int, groups: int, size: int, dtype: torch.dtype) -> None:
    case = cases.convolution(seed, blocks, block, groups, size, 1 + seed % 4, dtype)
    checks.check_convolution(emulated().grouped_convolution, case)


@few
@given(SEEDS, st.integers(0, 6), st.integers(1, 5), st.integers(1, 20), st.sampled_from([1, 5, 64, 256]), DTYPES)
def test_path(seed: int, batch: int, slots: int, candidates: int, rank: int, dtype: torch.dtype) -> None:
    checks.check_path(emulated().select_path, cases.path(seed, batch, slots, candidates, rank, 40, dtype))


def test_path_without_finite_scores() -> None:
    checks.check_path_without_finite_scores(emulated().select_path)


@few
@given(SEEDS, st.lists(st.integers(0, 6), max_size=4), st.sampled_from([1, 7, 300, 9000]), st.integers(1, 9), DTYPES)
def test_rejection(seed: int, counts: list[int], vocabulary: int, candidates: int, dtype: torch.dtype) -> None:
    case = cases.rejection(seed, counts, vocabulary, candidates, dtype)
    checks.check_rejection(emulated().reject_sparse, case)


def test_rejection_of_odd_rows() -> None:
    checks.check_rejection_of_odd_rows(emulated().reject_sparse)


@few
@given(SEEDS, st.integers(0, 5), st.integers(1, 3), st.sampled_from([8, 32, 64, 96, 128, 256]), DTYPES, st.booleans())
def test_context_rows(seed: int, rows: int, layers: int, size: int, dtype: torch.dtype, is_neox: bool) -> None:
    case = cases.context(seed, rows, layers, 1 + seed % 3, size, dtype, is_neox, [size, size // 2][seed % 2])
    checks.check_context_rows(emulated().context_kv_rows, case)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@few
@given(SEEDS, st.integers(0, 9), st.booleans())
def test_injection(layout: str, dtype: torch.dtype, seed: int, rows: int, per_layer: bool) -> None:
    case, keys, values = cases.injection(seed, rows, dtype, layout, per_layer, size=[16, 128][seed % 2])
    checks.check_injection(emulated().inject_context_kv, case, keys, values)


@pytest.mark.parametrize("weight", ["dense", "fp8", "int8"])
@settings(deadline=None, max_examples=4)
@given(SEEDS, st.integers(0, 16), st.sampled_from([64, 128]), st.sampled_from([torch.bfloat16, torch.float16]))
def test_projection(weight: str, seed: int, rows: int, size: int, dtype: torch.dtype) -> None:
    """The features stay in 16 bits and the sums in fp32: only the cache's rounding is left."""
    case = cases.projection(seed, rows, 2, 1, size, [32, 288][seed % 2], dtype, weight)
    keys, values = cases.caches(seed, 2, 5, 4, 1, size, dtype, "HND")
    case |= {"slot_mapping": torch.randperm(20, generator=cases.generator(seed))[:rows] - 1, "block_size": 4}

    def run(kv_weight: torch.Tensor, **rest: object) -> None:
        emulated().project_context_kv(weight=kv_weight, k_scale=1.0, v_scale=1.0, **rest)

    checks.check_projection(run, case, keys, values, rounding=0.0)


def test_conversions() -> None:
    checks.check_conversions(emulated().inject_context_kv)
