# SPDX-License-Identifier: Apache-2.0
"""What a DFlash or DFlash 2 checkpoint says about its drafter, resolved once and validated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.keys import shown

DFLASH = "DFlashDraftModel"
DFLASH2 = "DFlash2DraftModel"
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# Bounds far above any checkpoint, so that a damaged config cannot ask for the machine's memory.
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Layers = Annotated[int, Field(ge=1, le=1024)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Positive = Annotated[float, Field(gt=0)]


class DraftConfig(BaseModel):
    """A draft checkpoint's config.json, both dialects resolved into one shape.

    Field names are the keys of config.json where there is one. Build it with `dialects.parse_config`, whose
    errors are sentences. Sources: arXiv 2602.06036 and its published checkpoints; the DFlash 2 announcement.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    architecture: Literal["DFlashDraftModel", "DFlash2DraftModel"]
    declared_architecture: str
    dialect: Literal["z-lab", "speculators"]

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    intermediate_size: Size
    rms_norm_eps: Positive = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: Size
    dtype: str | None = None

    # None: the checkpoint does not say, and the target's vocabulary is meant.
    vocab_size: Size | None = None
    # None: the full vocabulary. Smaller than vocab_size: the checkpoint has its own lm_head and d2t.
    draft_vocab_size: Size | None = None
    has_own_lm_head: bool = False

    # None: as wide as the draft.
    target_hidden_size: Size | None = None
    # 0-based decoder layers whose output is tapped (Hugging Face hidden_states[i + 1]).
    target_layer_ids: tuple[int, ...]
    num_target_layers: Layers | None = None
    use_aux_hidden_state: bool = True

    mask_token_id: TokenId
    block_size: Annotated[int, Field(ge=2, le=4096)]

    # One entry a layer: the sliding window in tokens (None: full attention), and whether the block is causal.
    layer_windows: tuple[Size | None, ...]
    layer_causal: tuple[bool, ...]
    attention_sink_bias: bool = False
    attention_value_scale: float | None = None

    # rope_type and rope_theta are always there; the rotation covers the whole head.
    rope_parameters: dict[str, Any]
    is_neox_style: bool = True
    # What the checkpoint said of it. Not applied: a DFlash draft rotates the full head.
    partial_rotary_factor: float = 1.0

    logit_scale: Positive = 1.0
    output_multiplier: Positive = 1.0
    final_logit_softcapping: Annotated[float, Field(ge=0)] = 0.0
    input_embedding_scale: float = 1.0

    conv_kernel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    conv_group_size: Size | None = None
    selector_rank: Size | None = None
    selector_top_k: Annotated[int, Field(ge=1, le=4096)] | None = None

    quant_method: str | None = None
    # Keys inside dflash_config that nothing here reads.
    unknown_keys: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        for problem in (self._attention_problem(), self._taps_problem(), self._architecture_problem()):
            if problem:
                raise ValueError(problem)
        return self

    def _attention_problem(self) -> str | None:
        heads, kv_heads, layers = self.num_attention_heads, self.num_key_value_heads, self.num_hidden_layers
        if heads % kv_heads:
            return (
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                "every key head must serve the same number of query heads."
            )
        if self.head_dim % 2:
            return f"head_dim is {self.head_dim}; rotary positions need an even head size."
        if self.hidden_act != "silu":
            return f"hidden_act is {shown(self.hidden_act)}; a DFlash draft's MLP is SwiGLU, so it must be 'silu'."
        if len(self.layer_windows) != layers or len(self.layer_causal) != layers:
            return (
                f"layer_windows has {len(self.layer_windows)} entries and layer_causal "
                f"{len(self.layer_causal)} for {layers} layers."
            )
        return None

    def _taps_problem(self) -> str | None:
        taps = self.target_layer_ids
        if not taps:
            return "target_layer_ids is empty; the draft needs at least one tapped target layer."
        if min(taps) < 0:
            return f"target_layer_ids {list(taps)} has a negative id; ids are decoder layers counted from 0."
        if len(set(taps)) != len(taps):
            return f"target_layer_ids {list(taps)} names a layer twice; each tapped layer must stand once."
        if list(taps) != sorted(taps):
            return (
                f"target_layer_ids {list(taps)} is not ascending. The engine collects taps in layer order: "
                "fc would read them in another order than it was trained on. Sort the ids and permute the "
                "columns of fc.weight the same way."
            )
        return None

    def _architecture_problem(self) -> str | None:
        vocab, reduced = self.vocab_size, self.draft_vocab_size
        if vocab is not None and reduced is not None and reduced > vocab:
            return f"draft_vocab_size {reduced} is larger than vocab_size {vocab}."
        present = [key for key in DFLASH2_KEYS if getattr(self, key) is not None]
        if not self.is_dflash2:
            if present:
                return (
                    f"config.json has {_listed(present)} but names the architecture "
                    f"{self.declared_architecture}. Served as DFlash it would draft without its convolution "
                    f'and selector. If the checkpoint is a DFlash 2 one, set "architectures": ["{DFLASH2}"]; '
                    "if not, remove these keys."
                )
            return None
        missing = [key for key in DFLASH2_KEYS if getattr(self, key) is None]
        if missing:
            return (
                f"The checkpoint is a DFlash 2 draft ({self.declared_architecture}), but its config.json "
                f"lacks {_listed(missing)}. Copy config.json from the checkpoint's publisher, or add the "
                "keys to dflash_config."
            )
        group, top_k = self.conv_group_size, self.selector_top_k
        if group and self.hidden_size % group:
            return (
                f"conv_group_size {group} does not divide hidden_size {self.hidden_size}; the convolution "
                "works on groups of equal width."
            )
        if vocab is not None and top_k and top_k > vocab:
            return f"selector_top_k {top_k} is larger than vocab_size {vocab}."
        return None

    @property
    def is_dflash2(self) -> bool:
        """Whether the draft has the convolutions and the candidate selector of DFlash 2."""
        return self.architecture == DFLASH2

    @property
    def num_draft_tokens(self) -> int:
        """K, the most tokens one block drafts: the block without its anchor."""
        return self.block_size - 1

    @property
    def num_taps(self) -> int:
        """F, the number of tapped target layers."""
        return len(self.target_layer_ids)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The taps as vLLM numbers auxiliary layers (i + 1)."""
        return tuple(layer + 1 for layer in self.target_layer_ids)

    @property
    def conv_groups(self) -> int:
        """G = hidden_size / conv_group_size, the dynamic kernels of one convolution (DFlash 2 only)."""
        if self.conv_group_size is None:
            raise ValueError(f"A {self.architecture} has no convolution.")
        return self.hidden_size // self.conv_group_size

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether the draft's head covers only part of the vocabulary, through d2t."""
        return self.draft_vocab_size is not None and self.draft_vocab_size != self.vocab_size

    @property
    def needs_own_lm_head(self) -> bool:
        """Whether the checkpoint must bring lm_head.weight itself."""
        return self.has_own_lm_head or self.reduced_vocabulary

    @property
    def softcap(self) -> float | None:
        """s of the cap s·tanh(z/s), applied after the multiplier; None where there is none (DFlash has none)."""
        return self.final_logit_softcapping or None if self.is_dflash2 else None

    @property
    def logit_multiplier(self) -> float:
        """The factor on lm_head's output: output_multiplier for DFlash 2, logit_scale for DFlash."""
        return self.output_multiplier if self.is_dflash2 else self.logit_scale

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens (a key nearer than it is visible); None: full attention."""
        return self.layer_windows[layer]

    def with_window(self, tokens: int) -> DraftConfig:
        """This draft with a window of so many tokens in the layers that have full attention."""
        return self.model_copy(update={"layer_windows": tuple(w or tokens for w in self.layer_windows)})

    def is_causal(self, layer: int) -> bool:
        """Whether a block query of `layer` sees only block tokens at or before its own position."""
        return self.layer_causal[layer]


def build_draft_config(**fields: Any) -> DraftConfig:
    """DraftConfig(**fields) whose failure is one CheckpointError, in sentences about config.json."""
    try:
        return DraftConfig(**fields)
    except ValidationError as error:
        sentences = [_sentence(dict(detail)) for detail in error.errors()]
        raise CheckpointError("bad_config", " ".join(sentences[:3])) from None


_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "dict_type": "an object",
}
_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def _sentence(detail: dict[str, Any]) -> str:
    """One pydantic error as a sentence for the person at the terminal."""
    key = ".".join(str(part) for part in detail["loc"] if isinstance(part, (str, int)))
    context = detail.get("ctx") or {}
    if detail["type"] == "value_error":
        return str(context["error"])
    if detail["type"] == "missing":
        return f"config.json lacks {key}."
    limits = {bound: context[bound] for bound in _BOUNDS if bound in context}
    expected = [f"{_BOUNDS[b]} {int(limit) if limit == int(limit) else limit}" for b, limit in limits.items()]
    wanted = expected[0] if expected else _EXPECTED.get(detail["type"], detail["msg"].lower())
    return f"{key} is {shown(detail['input'])} in config.json; it must be {wanted}."


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
