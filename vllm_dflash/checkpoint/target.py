# SPDX-License-Identifier: Apache-2.0
"""The few facts about a target that a draft must agree with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.keys import as_count, shown

# Where multimodal configs keep their language model's part.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "language_model", "thinker_config")
_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
Count = Annotated[int, Field(ge=1)]


class TargetFacts(BaseModel):
    """What a target's config says: vocabulary, residual width, decoder layers and the longest position."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    vocab_size: Count
    hidden_size: Count
    num_layers: Count
    # None: not known. The served length, where it is known, says more than the config's.
    max_position_embeddings: Count | None = None

    @classmethod
    def from_hf_config(cls, raw: Any, name: str, *, max_model_len: int | None = None) -> TargetFacts:
        """The facts in the object `raw` of a target's config.json, its nested text config first.

        `max_model_len` is the length the target is served with. Raises CheckpointError for a missing fact.
        """
        if not isinstance(raw, Mapping):
            raise CheckpointError("bad_target", f"The config of {name} is {shown(raw)}, not an object.")
        levels = _levels(raw)
        facts: dict[str, int | None] = {}
        for fact, keys in _NAMES.items():
            stated = (as_count(key, level.get(key)) for level in levels for key in keys)
            facts[fact] = next((value for value in stated if value is not None), None)
            if facts[fact] is None and fact != "max_position_embeddings":
                raise CheckpointError(
                    "bad_target",
                    f"The config of the target {name} has no {keys[0]}.",
                    "A draft cannot be checked against it.",
                )
        if max_model_len is not None:
            facts["max_position_embeddings"] = max_model_len
        return cls.model_validate({"name": name, **facts})


def _levels(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`raw` and the text configs nested in it, innermost first, three levels deep at most."""
    levels = [raw]
    for _ in range(3):
        nested = (levels[0].get(key) for key in _TEXT_CONFIGS)
        inner = next((value for value in nested if isinstance(value, Mapping) and value), None)
        if inner is None:
            break
        levels.insert(0, inner)
    return levels
