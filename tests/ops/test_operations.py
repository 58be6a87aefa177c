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
def test_convolution(
    name: str, seed: int, blocks: int, block: int, groups: int, size: int, dtype: torch.dtype
) -> None:
    case = cases.convolution(seed, blocks, block, groups, size, 1 + seed % 4, dtype)
    checks.check_convolution(implementation(name).grouped_convolution, case)


@each
@given(SEEDS, st.integers(0, 6), st.integers(1, 5), st.integers(1, 20), st.sampled_from([1, 5, 64]), DTYPES)
def test_path(
    name: str, seed: int, batch: int, slots: int, candidates: int, rank: int, dtype: torch.dtype
) -> None:
    checks.check_path(
        implementation(name).select_path, cases.path(seed, batch, slots, candidates, rank, 40, dtype)
    )


@each
def test_path_without_finite_scores(name: str) -> None:
    """NaN, -inf and absent candidates are never chosen; a slot without a finite one ends the draft."""
    case = cases.path(7, batch=4, slots=3, candidates=4, rank=8, vocabulary=20, dtype=torch.float32)
    case["candidate_logits"][0, 1] = -torch.inf
    case["candidate_logits"][1, 0] = torch.nan
    case["candidate_ids"][2, 1, :3] = torch.tensor([-1, 20, 1 << 40])
    case["anchors"][3] = 20
    checks.check_path(implementation(name).select_path, case)
    tokens, _ = implementation(name).select_path(**case)
    assert (tokens[0] >= 0).tolist() == [True, False, False]
    assert tokens[1].tolist() == [-1, -1, -1] and tokens[3].tolist() == [-1, -1, -1]
    assert tokens[2, 1] == case["candidate_ids"][2, 1, 3]


@each
@given(
    SEEDS, st.lists(st.integers(0, 6), max_size=6), st.sampled_from([1, 7, 300]), st.integers(1, 9), DTYPES
)
def test_rejection(
    name: str, seed: int, counts: list[int], vocabulary: int, candidates: int, dtype: torch.dtype
) -> None:
    case = cases.rejection(seed, counts, vocabulary, candidates, dtype)
    checks.check_rejection(implementation(name).reject_sparse, case)


@each
def test_rejection_of_odd_rows(name: str) -> None:
    """Rows all -inf or NaN give -1, +inf takes all of p, no draft recovers from p, padding stays -1."""
    case = cases.rejection(8, [1, 1, 1, 0, 2], vocabulary=50, candidates=3, dtype=torch.float32)
    case["temperature"] = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    case["bonus_rows"] = torch.tensor([-1, -1, -1, -1, -1])
    case["draft_ids"][:] = 1
    case["logits"][case["draft_rows"][0]] = -torch.inf
    case["logits"][case["draft_rows"][1]] = torch.nan
    case["logits"][case["draft_rows"][2], 33] = torch.inf
    case["draft_ids"][3] = -1
    checks.check_rejection(implementation(name).reject_sparse, case)
    output, accepted = implementation(name).reject_sparse(**case)
    assert output[0, 0] == -1 and output[1, 0] == -1 and output[2, 0] == 33 and (output[3] == -1).all()
    assert output[4, 0] >= 0 and output[4, 1] == -1 and accepted.tolist() == [0, 0, 0, 0, 0]


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
    kv_type = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    case = cases.context(seed, rows, 2, 2, 16, kv_type, seed % 3 > 0)
    keys, values = cases.caches(seed, 2, 5, 4, 2, 16, dtype, layout)
    rng = cases.generator(seed)
    slots = torch.stack([torch.randperm(20, generator=rng)[:rows] for _ in range(2)])
    slots[torch.rand(2, rows, generator=rng) < 0.2] = -1
    case |= {"slot_mapping": slots if per_layer else slots[0], "block_size": 4}
    case |= {"k_scale": 0.5, "v_scale": 0.01}
    checks.check_injection(implementation(name).inject_context_kv, case, keys, values)
