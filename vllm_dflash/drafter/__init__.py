# SPDX-License-Identifier: Apache-2.0
"""The draft network: DFlash and DFlash 2 on vLLM's parallel and quantisable layers."""
