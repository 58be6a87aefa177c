# SPDX-License-Identifier: Apache-2.0
"""Key lookup in a draft's config.json: inside dflash_config first, then at the top level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_dflash.checkpoint.errors import CheckpointError

# Everything the drafter itself is told; the layer shape and RoPE stand at the top level only.
DRAFTER_KEYS = (
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "block_size",
    "causal",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "attention_value_scale",
    "use_aux_hidden_state",
    "sample_from_anchor",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
)


@dataclass(frozen=True)
class DraftKeys:
    """A config.json as two levels: `nested` (dflash_config) and `top`. A JSON null reads as absent."""

    nested: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)

    def drafter(self, key: str) -> Any:
        """The value of a drafter key: nested first, then top level; None if absent."""
        value = self.nested.get(key)
        return self.top.get(key) if value is None else value

    def drafter_flag(self, key: str) -> bool | None:
        """`drafter(key)` as a boolean. Raises CheckpointError for anything but true, false and null."""
        return as_flag(key, self.drafter(key))

    def top_flag(self, key: str) -> bool | None:
        """The top-level `key` as a boolean. Raises CheckpointError for anything but true, false and null."""
        return as_flag(key, self.top.get(key))


def as_flag(key: str, value: Any) -> bool | None:
    """`value` if it is a boolean or None; raises CheckpointError otherwise."""
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError("bad_config", f"{key} is {shown(value)} in config.json; it must be true or false.")


def as_count(key: str, value: Any) -> int | None:
    """`value` if it is a whole number from 1 on, or None; raises CheckpointError otherwise."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise CheckpointError(
        "bad_config", f"{key} is {shown(value)} in config.json; it must be a whole number of at least 1."
    )


def as_layer_ids(key: str, value: Any) -> tuple[int, ...]:
    """`value` as a tuple of whole numbers; raises CheckpointError for anything but a list of them."""
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return tuple(value)
    raise CheckpointError("bad_config", f"{key} is {shown(value)} in config.json; it must be a list of whole numbers.")


def as_object(key: str, value: Any) -> Mapping[str, Any]:
    """`value` as a JSON object (null: empty); raises CheckpointError for anything else."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    raise CheckpointError("bad_config", f"{key} is {shown(value)} in config.json; it must be an object.")


def shown(value: Any) -> str:
    """repr(value), cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
