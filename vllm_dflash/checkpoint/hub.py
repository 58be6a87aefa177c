# SPDX-License-Identifier: Apache-2.0
"""A draft checkpoint on the Hugging Face hub: its config and headers, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.safetensors_header import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    TensorInfo,
    index_files,
    no_safetensors,
    read_folder,
)


def fetch_file(repo_id: str, name: str, revision: str | None) -> Path | None:
    """The local path of the file `name` of a hub model, downloaded if need be; None if the model has none.

    HF_HUB_OFFLINE and the hub's cache are honoured. Raises CheckpointError.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, name, revision=revision))
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE and name != "config.json":
            return None
        raise _unreachable(repo_id, revision, error) from None
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise _unreachable(repo_id, revision, error) from None


def read_hub_tensors(repo_id: str, revision: str, snapshot: Path) -> tuple[dict[str, TensorInfo], Path | None]:
    """(name to TensorInfo of a hub model's weights, `snapshot` if they are cached there).

    Weights that are not cached are not downloaded; ranged reads give their headers. Raises CheckpointError,
    for a pickle in place of safetensors too.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    if any((snapshot / name).exists() for name in (INDEX_FILE, "model.safetensors")):
        try:
            return read_folder(snapshot), snapshot
        except CheckpointError as error:
            # The cache may hold a part of the shards only; the hub has them all.
            if error.finding.code != "missing_file":
                raise
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            "offline",
            f"The weights of {repo_id} are not in the hub's cache, and HF_HUB_OFFLINE is set.",
            fix="Download the model first, or give the path of a folder that holds it.",
        )
    api = HfApi()
    try:
        metadata = api.get_safetensors_metadata(repo_id, revision=revision)
    except NotASafetensorsRepoError:
        names = _file_names(api, repo_id, revision)
        raise no_safetensors(repo_id, [n for n in names if n.endswith(PICKLE_SUFFIXES)]) from None
    except SafetensorsParsingError as error:
        raise CheckpointError("bad_weights", f"The weights of {repo_id} are damaged: {error}.") from None
    except Exception as error:
        raise _unreachable(repo_id, revision, error) from None
    if metadata.sharded:
        index_files({"weight_map": dict(metadata.weight_map)})
    tensors = {
        name: TensorInfo(info.dtype, tuple(info.shape), file)
        for file, header in metadata.files_metadata.items()
        for name, info in header.tensors.items()
    }
    return tensors, None


def _file_names(api: Any, repo_id: str, revision: str) -> list[str]:
    try:
        return list(api.list_repo_files(repo_id, revision=revision))
    except Exception as error:
        raise _unreachable(repo_id, revision, error) from None


def _unreachable(repo_id: str, revision: str | None, error: Exception) -> CheckpointError:
    """Why the hub did not give what was asked, as a sentence."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return CheckpointError(
            "gated",
            f"The model {repo_id} is gated on the hub.",
            fix=f"Accept its terms at {constants.ENDPOINT}/{repo_id} and log in, or set HF_TOKEN.",
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError("no_revision", f"The model {repo_id} has no revision {revision} on the hub.")
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return CheckpointError(
            "no_model",
            f"There is no folder {repo_id} and no such model on the hub.",
            fix="Check the name; a private model needs a login or HF_TOKEN.",
        )
    if constants.HF_HUB_OFFLINE:
        return CheckpointError(
            "offline",
            f"The model {repo_id} is not in the hub's cache, and HF_HUB_OFFLINE is set.",
            fix="Download it first, or give the path of a folder that holds it.",
        )
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = (str(error).splitlines() or [""])[0][:200]
    return CheckpointError(
        "hub", f"The model {repo_id} could not be read from the hub: {type(error).__name__}: {reason}"
    )
