# SPDX-License-Identifier: Apache-2.0
"""A draft checkpoint, from a folder or a hub id: what it says and what it has, before any weight loads."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.bounded_json import read_json_object
from vllm_dflash.checkpoint.config import DraftConfig
from vllm_dflash.checkpoint.dialects import parse_config
from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.mask_embedding import read_mask_embedding
from vllm_dflash.checkpoint.safetensors_header import MASK_EMBEDDING_FILE, TensorInfo, read_folder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DraftCheckpoint:
    """One draft: `tensors` are the headers under the checkpoint's own names, `mask_embedding` is [H] or None.

    `source` and `revision` are what was asked for. `folder` is where the files are, or None for a hub model
    whose weights have not been downloaded.
    """

    source: str
    folder: Path | None
    raw: dict[str, Any]
    config: DraftConfig
    tensors: dict[str, TensorInfo]
    mask_embedding: torch.Tensor | None
    revision: str | None = None


def load_draft(
    path_or_id: str, revision: str | None = None, *, num_target_layers: int | None = None
) -> DraftCheckpoint:
    """Read config.json, the tensor headers and mask_embedding.pt of the draft `path_or_id`.

    A folder is read where it is; anything else is a hub id, of which no weights are downloaded.
    `num_target_layers` serves old checkpoints that name no taps. Raises CheckpointError.
    """
    folder = _local_folder(path_or_id)
    if folder is not None:
        raw = read_draft_config(path_or_id)
        config = parse_config(raw, num_target_layers=num_target_layers)
        config = _with_separate_quantisation(config, folder / "hf_quant_config.json")
        tensors = read_folder(folder)
        mask: Path | None = folder / MASK_EMBEDDING_FILE
    else:
        from vllm_dflash.checkpoint.hub import fetch_file, read_hub_tensors

        config_path = _hub_config(path_or_id, revision)
        # The snapshot's folder is named by the commit, so that all files come from one.
        commit = config_path.parent.name
        raw = read_json_object(config_path, f"config.json of {path_or_id}")
        config = parse_config(raw, num_target_layers=num_target_layers)
        quant = fetch_file(path_or_id, "hf_quant_config.json", commit)
        config = _with_separate_quantisation(config, quant)
        tensors, folder = read_hub_tensors(path_or_id, commit, config_path.parent)
        mask = fetch_file(path_or_id, MASK_EMBEDDING_FILE, commit)
    embedding = None
    if mask is not None and mask.exists():
        embedding = read_mask_embedding(mask, hidden_size=config.hidden_size, mask_token_id=config.mask_token_id)
    if folder is not None and config.reduced_vocabulary and "d2t" in tensors:
        check_d2t(folder, tensors["d2t"], config)
    return DraftCheckpoint(path_or_id, folder, raw, config, tensors, embedding, revision)


def read_draft_config(path_or_id: str, revision: str | None = None) -> dict[str, Any]:
    """The object in a draft's config.json, from a folder or the hub. Raises CheckpointError."""
    folder = _local_folder(path_or_id)
    if folder is None:
        return read_json_object(_hub_config(path_or_id, revision), f"config.json of {path_or_id}")
    return read_json_object(folder / "config.json")


def check_d2t(folder: Path, info: TensorInfo, config: DraftConfig) -> None:
    """Raise CheckpointError unless every draft id i maps to a target id i + d2t[i] inside the vocabulary."""
    if info.dtype != "I64" or config.vocab_size is None or info.shape != (config.draft_vocab_size,):
        return  # the pair's check says what is wrong with it
    offsets = array("q")
    with (folder / info.file).open("rb") as file:
        file.seek(info.begin)
        offsets.frombytes(file.read(info.end - info.begin))
    if sys.byteorder == "big":
        offsets.byteswap()
    outside = next((i for i, o in enumerate(offsets) if not 0 <= i + o < config.vocab_size), None)
    if outside is not None:
        raise CheckpointError(
            "d2t_range",
            f"d2t maps the draft's id {outside} to {outside + offsets[outside]}, but the vocabulary has "
            f"{config.vocab_size} tokens.",
            fix="Download the checkpoint again, or take d2t from the draft's own training run.",
        )


def _local_folder(path_or_id: str) -> Path | None:
    """The folder `path_or_id` names, None if it can only be a hub id. Raises CheckpointError for neither."""
    if "\0" in path_or_id:
        raise CheckpointError("no_model", f"{path_or_id!r} is no usable path: it has a null byte.")
    try:
        path = Path(path_or_id).expanduser()
        if path.is_dir():
            return path
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError("no_model", f"{path_or_id[:200]!r} is no usable path: {error}.") from None
    if exists:
        raise CheckpointError(
            "no_model", f"{path_or_id} is a file.", fix="Give the folder that holds config.json, or a hub id."
        )
    if path.is_absolute() or path_or_id.startswith((".", "~")) or path_or_id.count("/") != 1:
        raise CheckpointError(
            "no_model",
            f"There is no folder {path_or_id}.",
            fix="Give the folder that holds config.json, or a hub id such as z-lab/Qwen3-8B-DFlash-b16.",
        )
    return None


def _hub_config(repo_id: str, revision: str | None) -> Path:
    from vllm_dflash.checkpoint.hub import fetch_file

    path = fetch_file(repo_id, "config.json", revision)
    if path is None:
        raise CheckpointError("missing_file", f"The model {repo_id} on the hub has no config.json.")
    return path


def _with_separate_quantisation(config: DraftConfig, path: Path | None) -> DraftConfig:
    """`config` marked as quantised where a file of its own says so (NVIDIA Model Optimizer's exports)."""
    if config.quant_method is None and path is not None and path.exists():
        return config.model_copy(update={"quant_method": "modelopt"})
    return config
