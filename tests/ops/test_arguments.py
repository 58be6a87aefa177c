# SPDX-License-Identifier: Apache-2.0
"""The compiled operations refuse what does not fit in the caller's words, and torch.compile can trace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops import cases
from tests.ops.implementations import instruction_sets
from vllm_dflash import ops

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the extension is not built")
F32 = torch.float32
Case = Callable[[], cases.Arguments]
Change = Callable[[Any], Any]


def convolution() -> cases.Arguments:
    return cases.convolution(1, blocks=2, block=4, groups=2, size=8, taps=2, dtype=F32)


def path() -> cases.Arguments:
    return cases.path(1, batch=3, slots=2, candidates=4, rank=8, vocabulary=20, dtype=F32)


def rejection() -> cases.Arguments:
    return cases.rejection(1, counts=[2, 1], vocabulary=30, candidates=4, dtype=F32)


def rows() -> cases.Arguments:
    return cases.context(1, rows=4, layers=2, heads=2, size=16, dtype=F32, is_neox=True)


def injection() -> cases.Arguments:
    case, keys, values = cases.injection(1, 4, F32, "NHD", False, size=16)
    return case | {"key_caches": keys, "value_caches": values}


OPERATIONS: dict[str, Case] = {
    "grouped_convolution": convolution,
    "select_path": path,
    "reject_sparse": rejection,
    "context_kv_rows": rows,
    "inject_context_kv": injection,
}


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.T.contiguous().T


def swapped_last(caches: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*caches[:-1], caches[-1].transpose(1, 2).contiguous().transpose(1, 2)]


WRONG: list[tuple[str, str, Change, str]] = [
    ("grouped_convolution", "x", lambda x: x[0], r"x must be \[rows, H\], is \[16\]"),
    ("grouped_convolution", "x", column_major, r"x must have stride 1 in its last dimension, has 8"),
    ("grouped_convolution", "x", torch.Tensor.double, "x must be float32, bfloat16 or float16, is float64"),
    ("grouped_convolution", "base", torch.Tensor.half, "base must be float32 like x, is float16"),
    ("grouped_convolution", "base", lambda x: x[:, 1:], r"\[Kc of dynamic, H of x\] = \[2, 16\], is \[2, 15\]"),
    ("grouped_convolution", "block", lambda _: 0, "block is 0; it must be at least 1"),
    ("select_path", "candidate_ids", torch.Tensor.int, "candidate_ids must be int64, is int32"),
    ("select_path", "anchors", lambda x: x[1:], r"anchors must be \[B of candidate_ids\] = \[3\], is \[2\]"),
    ("select_path", "successor", lambda x: x[:5], r"successor must be \[V of predecessor, R of projected\]"),
    ("reject_sparse", "cu_drafts", torch.Tensor.long, "cu_drafts must be int32, is int64"),
    ("reject_sparse", "seeds", lambda x: x[:1], r"seeds must be \[B, one less than cu_drafts\] = \[2\], is \[1\]"),
    ("reject_sparse", "logits", column_major, r"logits must have stride 1 .*; pass logits.contiguous\(\)"),
    ("reject_sparse", "max_drafts", lambda _: -1, "max_drafts must be at least 0, is -1"),
    ("context_kv_rows", "kv", lambda x: x[:, :, :1], r"kv must be \[T, L, 2, nkv, hd\] = \[4, 2, 2, 2, 16\]"),
    ("context_kv_rows", "cos_sin", lambda x: x.repeat(1, 2), "rot = 32, must be even and at most hd = 16"),
    ("context_kv_rows", "positions", torch.Tensor.int, "positions must be int64, is int32"),
    ("inject_context_kv", "key_caches", lambda x: x[:1], "key_caches has 1 tensors for 2 layers"),
    ("inject_context_kv", "block_size", lambda _: 8, r"nkv, hd\] = \[5, 8, 2, 16\], is \[5, 4, 2, 16\]"),
    ("inject_context_kv", "value_caches", swapped_last, "the same strides in every layer; layer 1 has"),
]


@pytest.mark.parametrize(("name", "argument", "change", "message"), WRONG)
def test_wrong_arguments(name: str, argument: str, change: Change, message: str) -> None:
    arguments = OPERATIONS[name]()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(RuntimeError, match=f"^{name}: .*{message}"):
        getattr(ops, name)(**arguments)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_dispatcher_s_checks(name: str) -> None:
    """Schema (what is mutated) and fake implementation agree with what runs."""
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.vllm_dflash, name).default, (), OPERATIONS[name](), test_utils=tests)


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_equals_eager(name: str) -> None:
    eager, traced = OPERATIONS[name](), OPERATIONS[name]()
    operation = getattr(ops, name)
    want = operation(**eager)
    got = torch.compile(lambda arguments: operation(**arguments), backend="aot_eager", fullgraph=True)(traced)
    if name == "inject_context_kv":
        got, want = traced["key_caches"] + traced["value_caches"], eager["key_caches"] + eager["value_caches"]
        assert any((x != y).any() for x, y in zip(want, injection()["key_caches"], strict=False))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_empty_batches() -> None:
    none = ops.grouped_convolution(torch.zeros(0, 16), torch.zeros(0, 2, 2), torch.zeros(2, 16), 4)
    assert none.shape == (0, 16)
    empty = cases.path(1, batch=0, slots=2, candidates=4, rank=8, vocabulary=20, dtype=F32)
    assert [x.shape for x in ops.select_path(**empty)] == [(0, 2), (0, 2, 4)]
    empty = cases.rejection(1, counts=[], vocabulary=30, candidates=4, dtype=F32)
    assert [x.shape for x in ops.reject_sparse(**empty)] == [(0, 1), (0,)]
