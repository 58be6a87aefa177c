# SPDX-License-Identifier: Apache-2.0
"""mask_embedding.pt, the one file of a checkpoint that torch reads: a row in place of the mask's own."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.keys import shown
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
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise _bad("is no file.")
        if max(found.st_size, _unpacked(path)) > MAX_BYTES:
            raise _bad(
                f"is {max(found.st_size, _unpacked(path))} bytes; one row of {hidden_size} numbers is due.",
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
        if type(stated) is torch.Tensor and stated.numel() == 1 and stated.device.type == "cpu":
            stated = stated.item() if stated.layout == torch.strided else None
        if not isinstance(stated, int | float | str | None):
            raise _bad(f"has a {type(stated).__name__} for its mask_token_id.")
        if stated != mask_token_id:
            raise _bad(
                f"is for mask_token_id {shown(stated)}, but config.json says {mask_token_id}.",
                "Take both from the same revision of the checkpoint.",
            )
        state = state.get("embedding")
    if not isinstance(state, torch.Tensor):
        raise _bad(f"holds a {type(state).__name__}; a tensor is due, or a dict with the tensor 'embedding'.")
    try:
        return _row(state, hidden_size)
    except CheckpointError:
        raise
    except Exception as error:
        # Tensors of unusual kinds refuse one question or another.
        raise _bad(f"holds no plain tensor ({str(error).splitlines()[0][:160] if str(error) else error!r}).") from None


def _row(state: torch.Tensor, hidden_size: int) -> torch.Tensor:
    import torch

    if state.numel() != hidden_size or max(state.shape, default=0) != hidden_size:
        raise _bad(f"has the shape {list(state.shape)[:8]}, but the draft's hidden size is {hidden_size}.")
    if not state.is_floating_point() or state.layout != torch.strided or state.device.type != "cpu":
        raise _bad(f"holds {state.dtype} on {state.device}; plain floating-point numbers are due.")
    row = state.detach().reshape(-1).clone()
    if not bool(torch.isfinite(row.float()).all()):
        raise _bad("has numbers that are not finite.")
    return row


def _unpacked(path: Path) -> int:
    """Bytes of what the archive holds once unpacked, 0 for another kind of file: small ones can hold a machine full."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return 0


def _bad(what: str, fix: str = "") -> CheckpointError:
    return CheckpointError("mask_embedding", f"{MASK_EMBEDDING_FILE} {what}", fix=fix)
