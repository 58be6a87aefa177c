# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out while the drafter is loaded, as a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_dflash.checkpoint import CheckpointError, load_draft
from vllm_dflash.checkpoint.safetensors_header import tensor_bytes

# torch's allocator for processors, and the system's own words for the same, raise plain RuntimeErrors.
WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory")


@contextmanager
def enough_memory(source: str, revision: str | None = None) -> Iterator[None]:
    """What runs out of memory inside raises torch.OutOfMemoryError, which names the drafter `source` and its size."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _says_so(error):
            raise
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise torch.OutOfMemoryError(
            f"Memory ran out while the drafter was loaded, beside the target: {source} holds {_size(source, revision)} "
            f"of weights ({said}). Take a device with more memory, more tensor-parallel ranks or a smaller drafter; "
            "`vllm-dflash check TARGET DRAFT` says what a pair takes."
        ) from error


def _says_so(error: BaseException) -> bool:
    return any(words in str(error).lower() for words in WORDS)


def _size(source: str, revision: str | None) -> str:
    try:
        size = sum(tensor_bytes(tensor) for tensor in load_draft(source, revision).tensors.values())
    except (CheckpointError, MemoryError, OSError):
        return "an unknown size"
    return f"{size / 2**30:.2f} GiB"
