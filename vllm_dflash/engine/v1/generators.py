# SPDX-License-Identifier: Apache-2.0
"""Seeded requests whose prompt comes in chunks, on a CPU.

The runner samples a token for every row, throws away those of unfinished prompts and winds their generators back by
an offset. A CPU generator has no offset, so that call ends the engine. Here such rows have no generator while that
happens: nothing is drawn from it and nothing is to be wound back.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np


def sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner._sample, without the generators of unfinished prompts on a CPU."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.vllm_dflash_held = {}
        generators = self.input_batch.generators
        if generators and self.device.type == "cpu":
            unfinished = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
            self.vllm_dflash_held = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        return stock(self, *args, **kwargs)

    return wrapper


def bookkeeping_sync(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner._bookkeeping_sync, after which those generators are back."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(self.vllm_dflash_held)

    return wrapper
