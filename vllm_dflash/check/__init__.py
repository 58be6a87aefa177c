# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash check`: whether a pair will serve, and with what, before anything is loaded."""
