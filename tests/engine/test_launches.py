# SPDX-License-Identifier: Apache-2.0
"""How many kernels the context part of a V2 draft step launches, stock's and ours, on tensors shaped as on a GPU.

Operators are counted as a dispatch mode sees them; views and uninitialised allocations launch nothing. The tensors
are on the meta device: what an operator would compute is another test's matter. Triton's input kernel, one a KV cache
group and the same for both, is counted by hand.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

from vllm_dflash import ops
from vllm_dflash.engine.context_writer import ContextWriter, PagedCaches
from vllm_dflash.ops import context_kv, projection

# z-lab/Qwen3.8-27B-DFlash2: five layers, five taps of a target of the same width.
L, TAPS, H, HEADS, HD, BLOCK = 5, 5, 5120, 8, 128, 16
INPUT_KERNELS = 1


class Launches(TorchDispatchMode):
    """Counts operators. Those of vLLM and of this package, which know no meta device, are not run: they write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not func.is_view and not name.startswith(("aten.empty", "aten.new_empty")):
            self.names.append(name)
        if not name.startswith("aten.") and not func._schema.returns:
            return None
        return func(*args, **(kwargs or {}))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def combine(rows: int) -> torch.Tensor:
    """What both do first: the taps side by side, through fc, into the step's buffer."""
    taps = [meta(rows, H) for _ in range(TAPS)]
    features = torch.nn.functional.linear(torch.cat(taps, dim=-1), meta(H, TAPS * H))
    return meta(rows, H).copy_(features)


def stock(rows: int) -> list[str]:
    with Launches() as launches:
        write = functools.partial(launches.names.append, "a layer's cache write")
        layers = [
            SimpleNamespace(kv_cache=None, impl=SimpleNamespace(do_kv_cache_update=lambda *_: write()))
            for _ in range(L)
        ]
        model = SimpleNamespace(
            _num_attn_layers=L, _kv_size=HEADS * HD, _head_dim=HD, _num_kv_heads=HEADS, _rms_norm_eps=1e-6,
            _hidden_norm_weight=meta(H), _fused_kv_weight=meta(L * 2 * HEADS * HD, H), _fused_kv_bias=None,
            _k_norm_weights=meta(L, HD), _rope_cos_sin_cache=meta(4096, HD), _rope_head_size=HD, _rope_is_neox=True,
            _attn_layers=layers, layers=[SimpleNamespace(self_attn=SimpleNamespace())],
        )  # fmt: skip
        for name in ("_project_context_kv", "_normalize_context_k"):
            setattr(model, name, functools.partial(getattr(DFlashQwen3Model, name), model))
        positions, slots = meta(rows, dtype=torch.int64), meta(rows, dtype=torch.int64)
        DFlashQwen3Model.precompute_and_store_context_kv(model, combine(rows), positions, slots)
    return launches.names


def ours(rows: int) -> list[str]:
    with Launches() as launches:
        writer = ContextWriter.__new__(ContextWriter)
        caches = [meta(64, BLOCK, HEADS, HD) for _ in range(2 * L)]
        writer.caches = PagedCaches(caches[:L], caches[L:], BLOCK, 1.0, 1.0)
        writer.folded = meta(L * 2 * HEADS * HD, H)
        writer.projection = SimpleNamespace(
            stale=False,
            k_norm=meta(L, HD), eps=1e-6, bias=None, value_scale=None,
            rotary=SimpleNamespace(cos_sin_cache=meta(4096, HD), is_neox_style=True),
        )  # fmt: skip
        positions, slots = meta(rows, dtype=torch.int64), meta(rows, dtype=torch.int64)
        writer.write(combine(rows), positions, slots)
    return launches.names


def one_launch_rms_norm(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """torch's rms_norm is one kernel on CUDA; on the meta device it would come apart into seven operators."""
    return x.clone()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled extension serves, and its one-launch form fits where it would on an sm_80 and later."""
    assert ops.backend("cpu") == "native"
    for module in (projection, context_kv):
        monkeypatch.setattr(module, "is_native", lambda device_type: True)
        monkeypatch.setattr(module, "is_triton", lambda device_type: False)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", one_launch_rms_norm)
    fits = lambda features, *_: features.shape[0] <= projection.ONE_LAUNCH_ROWS  # noqa: E731
    monkeypatch.setattr(projection, "fits_one_launch", fits)


@pytest.mark.parametrize(("rows", "least"), [(8, 5), (16, 5), (17, 7), (2048, 7)])
def test_launches_of_the_context_part(rows: int, least: int) -> None:
    of_stock, of_ours = stock(rows), ours(rows)
    print(f"\n{rows} rows: stock {len(of_stock) + INPUT_KERNELS} {of_stock}")
    print(f"{rows} rows: ours {len(of_ours) + INPUT_KERNELS} {of_ours}")
    assert len(of_stock) + INPUT_KERNELS == 10 + L
    assert len(of_ours) + INPUT_KERNELS == least
