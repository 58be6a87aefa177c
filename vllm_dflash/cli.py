# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-dflash`."""

import argparse
from collections.abc import Sequence

from vllm_dflash import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (the process's own arguments by default); its exit code."""
    parser = argparse.ArgumentParser(prog="vllm-dflash", description="DFlash speculative decoding for vLLM")
    parser.add_argument("--version", action="version", version=f"vllm-dflash {__version__}")
    parser.parse_args(argv)
    parser.print_help()
    return 0
