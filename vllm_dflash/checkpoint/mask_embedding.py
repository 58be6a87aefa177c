# SPDX-License-Identifier: Apache-2.0
"""mask_embedding.pt, the one file of a checkpoint that torch reads: a row in place of the mask's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.safetensors_header import MASK_EMBEDDING_FILE

if TYPE_CHECKING:
    import torch

MAX_BYTES = 64 << 20


def read_mask_embedding(path: Path, *, hidden_size: int, mask_token_id: int) -> torch.Tensor:
    """The embedding [hidden_size] of the mask slots, in the file's own dtype, on the CPU.

    The file holds a tensor, or {"embedding": tensor, "mask_token_id": id}. It is loaded with weights_only, so
    nothing in it runs. Raises CheckpointError for another id, another size, or anything that is no such file.
    """
    import torch

    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _bad(
                f"is {size} bytes; one row of {hidden_size} numbers is due.",
                "Save a clone of the row: a view carries its whole table.",
            )
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError("unreadable_file", f"{path} cannot be read: {error}.") from None
    except CheckpointError:
        raise
    except Exception as error:
        # torch.load has no error type of its own for a damaged or refused file.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _bad(f"cannot be loaded with weights_only ({reason[:160]}).", "Save it as a plain tensor.") from None
    if isinstance(state, dict):
        stated = state.get("mask_token_id", mask_token_id)
        if isinstance(stated, torch.Tensor) and stated.numel() == 1:
            stated = stated.item()
        if stated != mask_token_id:
            raise _bad(
                f"is for mask_token_id {stated!r}, but config.json says {mask_token_id}.",
                "Take both from the same revision of the checkpoint.",
            )
        state = state.get("embedding")
    if not isinstance(state, torch.Tensor):
        raise _bad(f"holds a {type(state).__name__}; a tensor is due, or a dict with the tensor 'embedding'.")
    if state.numel() != hidden_size or max(state.shape, default=0) != hidden_size:
        raise _bad(f"has the shape {list(state.shape)}, but the draft's hidden size is {hidden_size}.")
    if not state.is_floating_point() or state.layout != torch.strided or state.device.type != "cpu":
        raise _bad(f"holds {state.dtype} on {state.device}; plain floating-point numbers are due.")
    row = state.detach().reshape(-1).clone()
    if not bool(torch.isfinite(row.float()).all()):
        raise _bad("has numbers that are not finite.")
    return row


def _bad(what: str, fix: str = "") -> CheckpointError:
    return CheckpointError("mask_embedding", f"{MASK_EMBEDDING_FILE} {what}", fix=fix)
