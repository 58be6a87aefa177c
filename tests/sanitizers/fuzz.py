# SPDX-License-Identifier: Apache-2.0
"""Calls a sanitized library's operations with random shapes for some seconds; `python -m tests.sanitizers.fuzz`.

Run with the sanitizer's runtime preloaded: every tensor then stands between forbidden bytes, and a kernel that reads or
writes one of these, or does what C++ leaves undefined, ends the program with a report.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.ops import cases, checks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operations(library: str, namespace: str) -> SimpleNamespace:
    sys.modules["vllm_dflash._C"] = None  # type: ignore[assignment] # the installed one must not answer
    torch.ops.load_library(library)
    return getattr(torch.ops, namespace)


def exact(x: torch.Tensor) -> torch.Tensor:
    """x in memory of its own, of exactly its size, so that the forbidden bytes begin where it ends."""
    if x.numel() == 0 or not x.is_contiguous():
        return x
    return x.clone()


def convolution(run: SimpleNamespace, rng: random.Random) -> None:
    size = rng.choice([1, 3, 8, 16, 40])
    case = cases.convolution(rng.randrange(1 << 30), rng.randrange(5), rng.randrange(1, 10), rng.randrange(1, 6), size,
                             rng.randrange(1, 5), rng.choice(DTYPES))  # fmt: skip
    cut = max(0, len(case["x"]) - rng.randrange(3))
    case |= {"x": exact(case["x"][:cut]), "dynamic": case["dynamic"][:cut]}
    checks.check_convolution(run.grouped_convolution, case)


def path(run: SimpleNamespace, rng: random.Random) -> None:
    rank = rng.choice([0, 1, 5, 8, 17, 64, 256])
    case = cases.path(rng.randrange(1 << 30), rng.randrange(6), rng.randrange(1, 6), rng.randrange(1, 21), max(rank, 1),
                      40, rng.choice(DTYPES))  # fmt: skip
    if rank == 0:
        case |= {name: case[name][..., :0] for name in ("projected", "predecessor", "successor")}
    ids = case["candidate_ids"]
    wild = torch.rand(ids.shape) < 0.1
    case["candidate_ids"] = torch.where(wild, torch.tensor(rng.choice([-1, 40, 1 << 40, -(1 << 62)])), ids)
    checks.check_path(run.select_path, {name: exact(x) for name, x in case.items()})


def rejection(run: SimpleNamespace, rng: random.Random) -> None:
    counts = [rng.randrange(7) for _ in range(rng.randrange(5))]
    vocabulary = rng.choice([1, 7, 33, 300, 4097, 9000])
    case = cases.rejection(rng.randrange(1 << 30), counts, vocabulary, rng.randrange(1, 10), rng.choice(DTYPES))
    if case["draft_ids"].numel():
        case["draft_ids"][0] = rng.choice([-1, 1 << 40, int(case["draft_ids"][0])])
    case = {name: exact(x) if isinstance(x, torch.Tensor) else x for name, x in case.items()}
    checks.check_rejection(run.reject_sparse, case)


def rows(run: SimpleNamespace, rng: random.Random) -> None:
    size = rng.choice([2, 8, 18, 32, 64, 80, 96, 128, 256])
    rotated = rng.choice([size, size // 2 // 2 * 2])
    case = cases.context(rng.randrange(1 << 30), rng.randrange(40), rng.randrange(1, 4), rng.randrange(1, 4), size,
                         rng.choice(DTYPES), rng.random() < 0.5, rotated)  # fmt: skip
    if case["positions"].numel():
        case["positions"][0] = rng.choice([-1, 64, 1 << 40, 63])
    checks.check_context_rows(run.context_kv_rows, case)


def injection(run: SimpleNamespace, rng: random.Random) -> None:
    dtype = rng.choice([*DTYPES, torch.float8_e4m3fn])
    count = rng.randrange(21)
    case, keys, values = cases.injection(rng.randrange(1 << 30), count, dtype, rng.choice(["NHD", "HND"]),
                                         rng.random() < 0.5, rng.choice([16, 64, 128]))  # fmt: skip
    if count:
        case["slot_mapping"][..., 0] = rng.choice([-1, 20, 1 << 40, -(1 << 62)])
    checks.check_injection(run.inject_context_kv, case, keys, values)


def projection(run: SimpleNamespace, rng: random.Random) -> None:
    count, size, dtype = rng.randrange(17), rng.choice([64, 128]), rng.choice(DTYPES[1:])
    case = cases.projection(rng.randrange(1 << 30), count, 2, 1, size, rng.choice([32, 288]), dtype,
                            rng.choice(["dense", "fp8", "int8"]))  # fmt: skip
    keys, values = cases.caches(1, 2, 5, 4, 1, size, dtype, "HND")
    case |= {"slot_mapping": torch.randperm(20)[:count] - 1, "block_size": 4}

    def call(kv_weight: torch.Tensor, **rest: Any) -> None:
        run.project_context_kv(weight=kv_weight, k_scale=1.0, v_scale=1.0, **rest)

    checks.check_projection(call, case, keys, values, rounding=0.0)


def overrun(run: SimpleNamespace) -> None:
    """A tensor whose memory is shorter than it says: the sanitizer must end the program here."""
    case = cases.convolution(0, 4, 4, 4, 16, 2, torch.float32)
    case["x"].untyped_storage().resize_(case["x"].numel() * 4 // 2)
    run.grouped_convolution(**case)


OPERATIONS: tuple[Callable[[SimpleNamespace, random.Random], None], ...] = (
    convolution, path, rejection, rows, injection, projection,
)  # fmt: skip
# The one launch of the projection is CUDA's alone.
ON_PROCESSORS = OPERATIONS[:-1]


def instruction_sets(run: SimpleNamespace) -> Iterator[str]:
    for name in ("baseline", "avx2", "avx512", "avx512bf16"):
        try:
            yield run.cpu_isa(name)
        except RuntimeError:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--emulated", action="store_true", help="the library holds the emulated CUDA kernels")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overrun", action="store_true", help="read past a tensor's end instead")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    run = operations(arguments.library, "vllm_dflash_emulated" if arguments.emulated else "vllm_dflash")
    if arguments.overrun:
        return overrun(run)
    rng = random.Random(arguments.seed)
    sets = [] if arguments.emulated else list(instruction_sets(run))
    calls, called = 0, OPERATIONS if arguments.emulated else ON_PROCESSORS
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end or calls < 10 * len(called):
        if sets:
            run.cpu_isa(rng.choice(sets))
        torch.manual_seed(rng.randrange(1 << 30))
        called[calls % len(called)](run, rng)
        calls += 1
    print(f"{calls} calls, {', '.join(sets) or 'emulated CUDA kernels'}: no fault")


if __name__ == "__main__":
    main()
