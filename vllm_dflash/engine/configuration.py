# SPDX-License-Identifier: Apache-2.0
"""From what the user wrote to a complete, checked speculative configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS, ModelRegistry

from vllm_dflash.checkpoint import (
    DraftCheckpoint,
    TargetFacts,
    find_draft,
    is_ours,
    load_draft,
    read_draft_config,
    require_compatible,
)
from vllm_dflash.options import ServerOptions, server_options

logger = init_logger(__name__)


@dataclass(frozen=True)
class Request:
    """What the user asked for: the --speculative-config keys, and the --spec-* flags that stand for some of them."""

    config: dict[str, Any]
    flags: dict[str, Any]
    options: ServerOptions

    def get(self, key: str) -> Any:
        return self.flags.get(key, self.config.get(key))


def asked_for(engine_args: Any) -> Request | None:
    """The user's DFlash request in vLLM's EngineArgs, or None if it is another method or none at all.

    Like stock, a model whose name says dflash means the method where none is given.
    """
    given = engine_args.speculative_config
    config = {key.replace("-", "_"): value for key, value in given.items()} if isinstance(given, dict) else {}
    flags = {
        key: value
        for key, attribute in (
            ("method", "spec_method"),
            ("model", "spec_model"),
            ("num_speculative_tokens", "spec_tokens"),
        )
        if (value := getattr(engine_args, attribute, None)) is not None
    }
    request = Request(config, flags, ServerOptions())
    method, model = request.get("method"), request.get("model")
    if method != "dflash" and not (method is None and isinstance(model, str) and "dflash" in model.lower()):
        return None
    return Request(config, flags, server_options(engine_args.additional_config))


def drafter_of(request: Request, target_name: str) -> tuple[str, str | None]:
    """(folder or hub id, revision) of the drafter that was asked for, or that the catalogue has for the target.

    Raises ValueError, a sentence, where there is none.
    """
    model, revision = request.get("model"), request.get("revision")
    if model is None:
        entry = find_draft(target_name, request.options.catalog)
        if entry is None:
            raise ValueError(
                f"No DFlash drafter is known for {target_name}. Name one with "
                '"model" in --speculative-config, or add the pair to a catalogue file and name that in '
                '--additional-config \'{"dflash": {"catalog": "FILE"}}\'.'
            )
        model, revision = entry.draft, entry.revision
        logger.info("DFlash drafter for %s: %s (from the catalogue)", target_name, model)
    if not isinstance(model, str):
        raise ValueError(f'"model" in --speculative-config must be a folder or a hub id, but it is {model!r}.')
    return model, revision


def asked_tokens(request: Request) -> Any:
    """The num_speculative_tokens that was asked for, None if it was left out."""
    asked = request.get("num_speculative_tokens")
    return int(asked) if isinstance(asked, str) and asked.isdecimal() else asked


def resolve(request: Request, target: Any) -> DraftCheckpoint | None:
    """The draft checkpoint, checked against the target (vLLM's ModelConfig); None for a kind that stock serves.

    Raises ValueError (CheckpointError) with one clear message on any mismatch, before weights load.
    """
    model, revision = drafter_of(request, target.model)
    raw = read_draft_config(model, revision)
    if not is_ours(raw):
        _refuse_an_ordinary_model(model, raw.get("architectures"))
        return None
    facts = target_facts(target)
    draft = load_draft(model, revision, num_target_layers=facts.num_layers)
    asked = asked_tokens(request)
    for warning in require_compatible(facts, draft.config, draft.tensors, asked, draft_name=model):
        logger.warning("%s", warning)
    return draft


def _refuse_an_ordinary_model(name: str, architectures: Any) -> None:
    """Stock serves more kinds of draft under the method "dflash"; of a model that is no draft it says it at length."""
    if not isinstance(architectures, list) or not architectures:
        return
    known = set(ModelRegistry.get_supported_archs())
    ordinary = known - set(_SPECULATIVE_DECODING_MODELS)
    if all(one in ordinary and f"DFlash{one}" not in known for one in architectures):
        raise ValueError(
            f"{name} is an ordinary model ({', '.join(architectures)}) and no DFlash drafter. Name a drafter that was "
            'trained for the target with "model" in --speculative-config, or leave "model" out and the catalogue is '
            "asked."
        )


def with_defaults(request: Request, draft: DraftCheckpoint) -> dict[str, Any]:
    """The --speculative-config that stock is given: what the user wrote, and for the rest what the checkpoint means.

    A key that a flag sets stays out, since stock refuses to be told twice.
    """
    defaults = {
        "method": "dflash",
        "model": draft.source,
        "revision": draft.revision,
        "num_speculative_tokens": draft.config.num_draft_tokens,
        "draft_sample_method": "probabilistic" if draft.config.is_dflash2 else "greedy",
        # The drafter owns its KV and writes it with the target's: nothing cached is volatile (vllm#54092).
        "disable_eagle_block_drop": True,
    }
    missing = {key: value for key, value in defaults.items() if request.get(key) is None and value is not None}
    return {**request.config, **missing}


def complete(speculative_config: Any, draft: DraftCheckpoint) -> None:
    """Give the built SpeculativeConfig the taps and the mask token where stock looks for them, whatever the dialect."""
    hf_config = speculative_config.draft_model_config.hf_config
    hf_config.eagle_aux_hidden_state_layer_ids = list(draft.config.aux_layer_ids)
    hf_config.dflash_config = {
        **(getattr(hf_config, "dflash_config", None) or {}),
        "target_layer_ids": list(draft.config.target_layer_ids),
        "mask_token_id": draft.config.mask_token_id,
    }


def require_block_length(options: ServerOptions, drafts: int) -> None:
    """Raise ValueError unless a fixed block length lies within the drafter's `drafts`."""
    if options.block_length != "auto" and options.block_length > drafts:
        raise ValueError(
            f'"dflash" in --additional-config: block_length is {options.block_length}, but the drafter drafts '
            f'{drafts} tokens a step. Give 0 to {drafts}, or "auto".'
        )


def target_facts(target: Any) -> TargetFacts:
    """What a draft must agree with, in vLLM's ModelConfig of the target."""
    return TargetFacts(
        name=target.model,
        vocab_size=target.get_vocab_size(),
        hidden_size=target.get_hidden_size(),
        num_layers=target.get_total_num_hidden_layers(),
        max_position_embeddings=target.max_model_len,
    )
