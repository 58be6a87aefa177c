# SPDX-License-Identifier: Apache-2.0
"""The drafter's attention backend by a name that stock does not have: "XFORMERS" stands in vLLM's place for custom
backends, since members that are added to its enum would not survive the way to another process."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

NAME = "XFORMERS"
PATH = "vllm_dflash.engine.xformers_backend.XFormersBackend"


def resolve(speculative_config: dict[str, Any]) -> dict[str, Any]:
    """A --speculative-config with our name replaced by vLLM's custom one, and that registered.

    Raises ValueError where another plug-in has taken the place.
    """
    asked = speculative_config.get("attention_backend")
    if not isinstance(asked, str) or asked.upper() != NAME:
        unregister()
        return speculative_config
    register()
    return {**speculative_config, "attention_backend": AttentionBackendEnum.CUSTOM.name}


def register() -> None:
    """Makes CUSTOM ours in this process."""
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != PATH:
        raise ValueError(
            f'"attention_backend": "{NAME}" needs vLLM\'s place for a custom attention backend, which '
            f"{custom.get_path()} has taken. Leave that plug-in out, or name a backend of vLLM's."
        )
    register_backend(custom, PATH)


def is_registered() -> bool:
    custom = AttentionBackendEnum.CUSTOM
    return custom.is_overridden() and custom.get_path() == PATH


def unregister() -> None:
    """Gives the place back, for an engine of another kind in the same process."""
    if is_registered():
        AttentionBackendEnum.CUSTOM.clear_override()
