# SPDX-License-Identifier: Apache-2.0
"""Whether a draft can draft for a target, decided before any weight loads."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_dflash.checkpoint.config import DraftConfig
from vllm_dflash.checkpoint.errors import Finding, IncompatibleDraft
from vllm_dflash.checkpoint.safetensors_header import TensorInfo
from vllm_dflash.checkpoint.target import TargetFacts
from vllm_dflash.checkpoint.weights import canonical_name, check_tensors

_OTHER_DRAFT = "Use the draft that was trained for this target."


def check_pair(
    target: TargetFacts,
    draft: DraftConfig,
    tensors: Mapping[str, TensorInfo] | None = None,
    num_speculative_tokens: int | None = None,
) -> list[Finding]:
    """Everything that speaks against `draft` for `target`, errors first.

    `tensors` are the checkpoint's headers by name; None leaves the weights unchecked.
    `num_speculative_tokens` is the K that is asked for; None means the draft's own.
    """
    findings = _vocabulary(target, draft)
    if draft.vocab_size is None:
        draft = draft.model_copy(update={"vocab_size": target.vocab_size})
    findings += [
        *_taps(target, draft),
        *_widths(target, draft, tensors),
        *_num_speculative_tokens(draft, num_speculative_tokens),
        *_left_out(target, draft),
    ]
    if tensors is not None:
        findings += check_tensors(draft, tensors, target_hidden_size=target.hidden_size)
    return sorted(findings, key=lambda finding: finding.severity != "error")


def require_compatible(
    target: TargetFacts,
    draft: DraftConfig,
    tensors: Mapping[str, TensorInfo] | None = None,
    num_speculative_tokens: int | None = None,
    *,
    draft_name: str = "The draft",
) -> list[Finding]:
    """Raise IncompatibleDraft with all errors of check_pair in one message, or return its warnings."""
    findings = check_pair(target, draft, tensors, num_speculative_tokens)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise IncompatibleDraft(f"{draft_name} cannot draft for {target.name}", errors)
    return findings


def _vocabulary(target: TargetFacts, draft: DraftConfig) -> list[Finding]:
    findings = []
    if draft.vocab_size is not None and draft.vocab_size != target.vocab_size:
        findings.append(
            Finding(
                "vocab_size",
                "error",
                f"The draft's vocabulary has {draft.vocab_size} tokens, that of {target.name} {target.vocab_size}.",
                "A drafted id would mean another token, or none.",
                _OTHER_DRAFT,
            )
        )
    elif draft.vocab_size is None and (draft.draft_vocab_size or 0) > target.vocab_size:
        findings.append(
            Finding(
                "vocab_size",
                "error",
                f"The draft's head covers {draft.draft_vocab_size} tokens, {target.name} has only {target.vocab_size}.",
                fix=_OTHER_DRAFT,
            )
        )
    reduced = draft.draft_vocab_size is not None and draft.draft_vocab_size != target.vocab_size
    if draft.is_dflash2 and reduced:
        findings.append(
            Finding(
                "dflash2_reduced_vocabulary",
                "error",
                f"The draft is a DFlash 2 one with draft_vocab_size {draft.draft_vocab_size}, but a selector "
                f"works on the full vocabulary, {target.vocab_size} tokens here.",
                fix="Use a DFlash 2 draft with the full vocabulary.",
            )
        )
    if draft.mask_token_id >= target.vocab_size:
        findings.append(
            Finding(
                "mask_token_id",
                "error",
                f"mask_token_id is {draft.mask_token_id}, but {target.name} embeds the ids 0 to "
                f"{target.vocab_size - 1} only.",
                "The mask slots would read past the embedding table.",
                _OTHER_DRAFT,
            )
        )
    return findings


def _taps(target: TargetFacts, draft: DraftConfig) -> list[Finding]:
    if not draft.use_aux_hidden_state:
        return [
            Finding(
                "no_taps",
                "error",
                "config.json says use_aux_hidden_state false: the draft was made without tapped layers.",
                "This package feeds a draft from tapped target layers only.",
                "Use a DFlash draft with target_layer_ids.",
            )
        ]
    absent = [layer for layer in draft.target_layer_ids if layer >= target.num_layers]
    if absent:
        return [
            Finding(
                "target_layer_ids",
                "error",
                f"The draft taps the target layers {list(draft.target_layer_ids)}, but {target.name} has "
                f"{target.num_layers} layers, 0 to {target.num_layers - 1}.",
                fix=_OTHER_DRAFT,
            )
        ]
    if draft.num_target_layers not in (None, target.num_layers):
        return [
            Finding(
                "num_target_layers",
                "warning",
                f"The draft was trained for a target of {draft.num_target_layers} layers, {target.name} has "
                f"{target.num_layers}.",
                "The taps exist, but may not hold what the draft learned to read; acceptance may be low.",
                _OTHER_DRAFT,
            )
        ]
    return []


def _widths(target: TargetFacts, draft: DraftConfig, tensors: Mapping[str, TensorInfo] | None) -> list[Finding]:
    """The taps' width, and the embeddings and the head that the draft shares with the target."""
    stated = draft.target_hidden_size or draft.hidden_size
    if stated != target.hidden_size:
        key = "target_hidden_size" if draft.target_hidden_size else "hidden_size"
        return [
            Finding(
                "hidden_size",
                "error",
                f"The draft's {key} is {stated}, the hidden size of {target.name} is {target.hidden_size}.",
                "The draft reads the target's hidden states as they are.",
                _OTHER_DRAFT,
            )
        ]
    if draft.hidden_size == target.hidden_size or tensors is None:
        return []
    names = {canonical_name(name) for name in tensors}
    lacking = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in names]
    if not lacking:
        return []
    return [
        Finding(
            "shared_width",
            "error",
            f"The draft is {draft.hidden_size} wide, {target.name} {target.hidden_size}, and the checkpoint "
            f"has no {' and no '.join(lacking)} of its own.",
            "A draft can share these with the target only where both have the same hidden size.",
            "Use a checkpoint that brings them.",
        )
    ]


def _num_speculative_tokens(draft: DraftConfig, asked: int | None) -> list[Finding]:
    most = draft.num_draft_tokens
    if asked is None or 1 <= asked <= most:
        return []
    if asked < 1:
        return [
            Finding(
                "num_speculative_tokens",
                "error",
                f"num_speculative_tokens is {asked}; this draft takes a number from 1 to {most}.",
                fix="To serve without speculation, leave --speculative-config out.",
            )
        ]
    return [
        Finding(
            "num_speculative_tokens",
            "error",
            f"num_speculative_tokens is {asked}, but the draft's block_size of {draft.block_size} gives "
            f"{most} at most.",
            "One slot of the block is the anchor, which is verified already.",
            f"Set num_speculative_tokens to a number from 1 to {most}, or leave it out.",
        )
    ]


def _left_out(target: TargetFacts, draft: DraftConfig) -> list[Finding]:
    """What works, with a loss that should be known."""
    findings = []
    longest = target.max_position_embeddings
    if longest is not None and draft.max_position_embeddings < longest:
        findings.append(
            Finding(
                "max_position_embeddings",
                "warning",
                f"The draft's max_position_embeddings is {draft.max_position_embeddings}, but {target.name} "
                f"goes to {longest}.",
                "Beyond that length the draft was not trained, and few of its tokens will be accepted.",
                f"Set --max-model-len {draft.max_position_embeddings} if longer requests are not needed.",
            )
        )
    if draft.partial_rotary_factor != 1.0:
        findings.append(
            Finding(
                "partial_rotary_factor",
                "warning",
                f"config.json says partial_rotary_factor {draft.partial_rotary_factor:g}; it is not applied.",
                "A DFlash draft rotates its full head; the key is often copied from the target.",
                "Remove the key from the draft's config.json.",
            )
        )
    if draft.is_dflash2 and draft.logit_scale not in (1.0, draft.output_multiplier):
        findings.append(
            Finding(
                "logit_scale",
                "warning",
                f"config.json says logit_scale {draft.logit_scale:g}, which DFlash 2 does not read.",
                "Its factor on the logits is output_multiplier.",
                "Move the value there if the draft was trained with it.",
            )
        )
    if draft.unknown_keys:
        findings.append(
            Finding(
                "unknown_keys",
                "warning",
                f"dflash_config has keys that nothing here reads: {', '.join(draft.unknown_keys)}.",
                "If the draft was trained with what they say, its acceptance may be low.",
            )
        )
    return findings
