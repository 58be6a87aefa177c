# SPDX-License-Identifier: Apache-2.0
"""The adapter for vLLM's V1 model runner."""
