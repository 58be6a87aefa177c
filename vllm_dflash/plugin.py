# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in every process (entry point group `vllm.general_plugins`)."""


def register() -> None:
    """Install the two hooks that wait for a DFlash configuration; everything else happens when they see one.

    Raises seams.SeamError when the installed vLLM is one that these hooks do not fit.
    """
    from vllm_dflash.engine import activation

    activation.install()
