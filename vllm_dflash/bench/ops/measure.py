# SPDX-License-Identifier: Apache-2.0
"""Times of two ways to the same result, taken in turn so that both see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """One operation at one shape. `moved`: bytes that must be read or written at least once."""

    op: str
    shape: str
    ours: Callable[[], object]
    stock: Callable[[], object]
    moved: int


@dataclass(frozen=True)
class Result:
    op: str
    shape: str
    ours_us: float
    stock_us: float
    ratio: float
    copy_us: float  # the bytes moved, at the measured bandwidth of a copy


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def once(run: Callable[[], object], calls: int) -> float:
    """Seconds a call, over `calls` of them."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize()
    return (time.perf_counter() - start) / calls


def copy_bandwidth(device: str = "cpu", size: int = 1 << 28) -> float:
    """Bytes a second, read and written, of a copy far larger than the caches."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / min(once(lambda: target.copy_(source), 1) for _ in range(5))


def compare(comparison: Comparison, bandwidth: float, seconds: float) -> Result:
    """Medians over about `seconds`; where a call is short, each sample is the mean of several."""
    first = once(comparison.ours, 1), once(comparison.stock, 1)
    calls = [max(1, min(200, int(0.002 / duration))) for duration in first]
    ours: list[float] = []
    stock: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < 5:
        ours.append(once(comparison.ours, calls[0]))
        stock.append(once(comparison.stock, calls[1]))
    a, b = statistics.median(ours) * 1e6, statistics.median(stock) * 1e6
    return Result(comparison.op, comparison.shape, a, b, b / a, comparison.moved / bandwidth * 1e6)
