# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash plan`: what speculation costs and gains, from measured or assumed times."""
