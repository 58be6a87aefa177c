# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-dflash`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_dflash import __version__

# Name -> what it does. Each is a package with `command.run(arguments) -> exit code`, imported when it is asked for.
COMMANDS = {
    "check": "whether a target and its drafter will serve, and how, before anything is loaded",
    "plan": "what speculation costs and gains: break-even and the best number of drafts",
    "bench": "measure a drafter against plain decoding and other methods on this machine",
}


def parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<7} {purpose}" for name, purpose in COMMANDS.items())
    made = argparse.ArgumentParser(
        prog="vllm-dflash",
        usage="vllm-dflash [--version] COMMAND ...",
        description=f"DFlash speculative decoding for vLLM.\n\ncommands:\n{listed}",
        epilog="`vllm-dflash COMMAND --help` tells more. Serving itself is `vllm serve`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"vllm-dflash {__version__}")
    made.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (the process's own arguments by default); its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = parser()
    if arguments and arguments[0] in COMMANDS:
        return importlib.import_module(f"vllm_dflash.{arguments[0]}.command").run(arguments[1:])
    known.parse_args(arguments)
    known.print_help()
    return 0
