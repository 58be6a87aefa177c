# SPDX-License-Identifier: Apache-2.0
"""The operations against what vLLM runs in their place, on this machine: python -m vllm_dflash.bench.ops"""
