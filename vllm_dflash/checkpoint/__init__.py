# SPDX-License-Identifier: Apache-2.0
"""What a draft checkpoint says: its config in both dialects, its weights, the catalogue, the pair checks."""

from vllm_dflash.checkpoint.catalog import CatalogEntry, find_draft, published_pairs, read_catalog
from vllm_dflash.checkpoint.compatibility import check_pair, require_compatible
from vllm_dflash.checkpoint.config import DraftConfig
from vllm_dflash.checkpoint.dialects import (
    DFLASH2_ARCHITECTURES,
    DFLASH_ARCHITECTURES,
    is_ours,
    parse_config,
    read_config,
)
from vllm_dflash.checkpoint.errors import CheckpointError, Finding, IncompatibleDraft
from vllm_dflash.checkpoint.load import DraftCheckpoint, load_draft, read_draft_config
from vllm_dflash.checkpoint.safetensors_header import TensorInfo, read_folder, read_header
from vllm_dflash.checkpoint.target import TargetFacts
from vllm_dflash.checkpoint.weights import canonical_name, check_tensors, optional_tensors, required_tensors

__all__ = [
    "DFLASH2_ARCHITECTURES",
    "DFLASH_ARCHITECTURES",
    "CatalogEntry",
    "CheckpointError",
    "DraftCheckpoint",
    "DraftConfig",
    "Finding",
    "IncompatibleDraft",
    "TargetFacts",
    "TensorInfo",
    "canonical_name",
    "check_pair",
    "check_tensors",
    "find_draft",
    "is_ours",
    "load_draft",
    "optional_tensors",
    "parse_config",
    "published_pairs",
    "read_catalog",
    "read_config",
    "read_draft_config",
    "read_folder",
    "read_header",
    "require_compatible",
    "required_tensors",
]
