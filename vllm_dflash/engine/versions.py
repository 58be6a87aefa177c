# SPDX-License-Identifier: Apache-2.0
"""The vLLM versions that this package is written for, and all that differs between them."""

from typing import Any

SUPPORTED = ("0.32", "0.33")


def is_supported(version: str) -> bool:
    """Whether a vLLM version such as "0.32.0+cpu" is one of the supported minor versions."""
    return version.startswith(tuple(f"{minor}." for minor in SUPPORTED))


def rejection_options(sampler: Any) -> dict[str, Any]:
    """What V2's `rejection_sample` takes from its sampler beside the common arguments: 0.33 has a method more."""
    names = ("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k")
    return {name: getattr(sampler, name) for name in names if hasattr(sampler, name)}
