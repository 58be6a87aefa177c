# SPDX-License-Identifier: Apache-2.0
"""DFlash and DFlash 2 speculative decoding for stock vLLM."""

__version__ = "0.1.0"
