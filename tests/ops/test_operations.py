# SPDX-License-Identifier: Apache-2.0
"""Every implementation against float64: the references in fp32, the extension by instruction set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops import cases, checks
from tests.ops.implementations import NAMES, implementation

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 1 << 30)
each = pytest.mark.parametrize("name", NAMES)


@each
@given(SEEDS, st.integers(0, 5), st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 3, 16]), DTYPES)
def test_convolution(name: str, seed: int, blocks: int, block: int, groups: int, size: int, dtype: torch.dtype) -> None:
    case = cases.convolution(seed, blocks, block, groups, size, 1 + seed % 4, dtype)
    checks.check_convolution(implementation(name).grouped_convolution, case)


@each
@given(SEEDS, st.integers(0, 6), st.integers(1, 5), st.integers(1, 20), st.sampled_from([1, 5, 64]), DTYPES)
def test_path(name: str, seed: int, batch: int, slots: int, candidates: int, rank: int, dtype: torch.dtype) -> None:
    checks.check_path(implementation(name).select_path, cases.path(seed, batch, slots, candidates, rank, 40, dtype))


@each
def test_path_without_finite_scores(name: str) -> None:
    checks.check_path_without_finite_scores(implementation(name).select_path)


@each
@given(SEEDS, st.lists(st.integers(0, 6), max_size=6), st.sampled_from([1, 7, 300]), st.integers(1, 9), DTYPES)
def test_rejection(
    name: str, seed: int, counts: list[int], vocabulary: int, candidates: int, dtype: torch.dtype
) -> None:
    case = cases.rejection(seed, counts, vocabulary, candidates, dtype)
    checks.check_rejection(implementation(name).reject_sparse, case)


@each
def test_rejection_of_odd_rows(name: str) -> None:
    checks.check_rejection_of_odd_rows(implementation(name).reject_sparse)


@each
@given(SEEDS, st.integers(0, 5), st.integers(1, 3), st.sampled_from([8, 32, 128]), DTYPES, st.booleans())
def test_context_rows(
    name: str, seed: int, rows: int, layers: int, size: int, dtype: torch.dtype, is_neox: bool
) -> None:
    case = cases.context(seed, rows, layers, 1 + seed % 3, size, dtype, is_neox, [size, size // 2][seed % 2])
    checks.check_context_rows(implementation(name).context_kv_rows, case)


@each
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@given(SEEDS, st.integers(0, 9), st.booleans())
def test_injection(name: str, layout: str, dtype: torch.dtype, seed: int, rows: int, per_layer: bool) -> None:
    case, keys, values = cases.injection(seed, rows, dtype, layout, per_layer, size=16)
    checks.check_injection(implementation(name).inject_context_kv, case, keys, values)


@each
@pytest.mark.parametrize("weight", ["dense", "fp8", "int8"])
@given(SEEDS, st.integers(0, 9), DTYPES)
def test_projection(name: str, weight: str, seed: int, rows: int, dtype: torch.dtype) -> None:
    case = cases.projection(seed, rows, 2, 2, 16, 32, dtype, weight)
    keys, values = cases.caches(seed, 2, 5, 4, 2, 16, dtype, "NHD")
    case |= {"slot_mapping": torch.randperm(20, generator=cases.generator(seed))[:rows] - 1, "block_size": 4}
    rounding = 4 * checks.ONE_ROUNDING[dtype]  # the normed features and the GEMM's result are of that type
    checks.check_projection(implementation(name).project_context_kv, case, keys, values, rounding)


@each
def test_conversions(name: str) -> None:
    checks.check_conversions(implementation(name).inject_context_kv)
