# SPDX-License-Identifier: Apache-2.0
"""The vLLM versions that this package is written for."""

SUPPORTED = ("0.32", "0.33")


def is_supported(version: str) -> bool:
    """Whether a vLLM version such as "0.32.0+cpu" is one of the supported minor versions."""
    return version.startswith(tuple(f"{minor}." for minor in SUPPORTED))
