# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash check`: arguments, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint import CheckpointError, Finding

if TYPE_CHECKING:
    from vllm_dflash.check.sizes import Sizes
    from vllm_dflash.engine.inspection import Inspection

GIB = 1 << 30
EPILOG = """\
All other arguments are those of `vllm serve` and mean the same, for example --max-model-len 8192 --kv-cache-dtype fp8.
Give the positional arguments first. The target may be a folder with nothing but its config.json.

exit status: 0 the pair works; 1 it works with warnings, and --strict was given; 2 it does not work.
"""


def parser() -> argparse.ArgumentParser:
    """The command's own arguments; those of `vllm serve` are parsed by vLLM."""
    made = argparse.ArgumentParser(
        prog="vllm-dflash check",
        usage="vllm-dflash check TARGET [DRAFT] [options] [vllm serve's arguments]",
        description="Whether a target and its drafter will serve, and how: runner, attention backend, sizes.\n"
        "Configs and safetensors headers are read; no weight is loaded and no GPU is needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("target", metavar="TARGET", help="a folder or a hub id")
    made.add_argument("draft", metavar="DRAFT", nargs="?", help="a folder or a hub id (default: from the catalogue)")
    add_options(made)
    return made


def add_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--strict", action="store_true", help="exit 1 where there are warnings")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument(
        "--gpu", metavar="GPU", help="the server's GPU, if not in this machine: h100, or capability:GiB as 9.0:80"
    )
    made.add_argument("--memory", metavar="GIB", type=float, help="memory of one device, instead of what it has")
    made.add_argument(
        "--target-weights", metavar="GIB", type=float, help="the target's weights, if only its config is here"
    )


def run(argv: Sequence[str]) -> int:
    """`vllm-dflash check`; the exit code."""
    if any(argument in ("-h", "--help") for argument in argv):
        parser().print_help()
        return 0
    own = argparse.ArgumentParser(prog="vllm-dflash check", add_help=False, allow_abbrev=False)
    add_options(own)
    options, rest = own.parse_known_args(list(argv))
    names = []
    while rest and not rest[0].startswith("-"):
        names.append(rest.pop(0))
    if not 1 <= len(names) <= 2:
        parser().error(f"TARGET and DRAFT come first, then the options; found {len(names)} names before the options.")
    try:
        inspection, sizes, findings = examine(names[0], names[1] if len(names) == 2 else None, rest, options)
    except ValueError as error:
        parser().error(str(error))
    errors = any(finding.severity == "error" for finding in findings)
    code = 2 if errors else 1 if findings and options.strict else 0
    from vllm_dflash.check import report

    if options.json:
        print(json.dumps(report.as_json(inspection, sizes, findings, code), indent=2))
    else:
        width = min(120, shutil.get_terminal_size((100, 24)).columns)
        print(report.as_text(inspection, sizes, findings, width))
    return code


def examine(
    target: str, draft: str | None, serve_arguments: Sequence[str], options: argparse.Namespace
) -> tuple[Inspection, Sizes | None, list[Finding]]:
    """What `vllm serve` with these arguments would do, the sizes where they are known, and the findings.

    vLLM's own words go to stderr. Raises ValueError for arguments that contradict each other.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(sys.stderr):
        if options.gpu is not None:
            from vllm_dflash.engine import named_gpu

            named_gpu.pretend(named_gpu.parse_gpu(options.gpu))
        from vllm_dflash import plugin
        from vllm_dflash.engine import inspection as inspecting

        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        plugin.register()
        arguments = inspecting.engine_args(target, draft, serve_arguments)
        inspection = inspecting.inspect(arguments)
    return inspection, *findings_of(inspection, options)


def findings_of(inspection: Inspection, options: Any) -> tuple[Sizes | None, list[Finding]]:
    """The sizes, and all findings with the errors first. options: `memory` and `target_weights` in GiB, or None."""
    from vllm_dflash.check.advice import advice
    from vllm_dflash.check.sizes import sizes as sizes_of

    findings, sizes = list(inspection.findings), None
    if inspection.settings is not None and inspection.draft is not None and inspection.target is not None:
        given = options.target_weights
        weights = target_weights(inspection.target.name) if given is None else int(given * GIB)
        memory = None if options.memory is None else int(options.memory * GIB)
        sizes = sizes_of(inspection.settings, inspection.draft, weights, memory)
        findings += advice(inspection.settings, inspection.draft, sizes)
    elif inspection.served_by_stock:
        findings.append(
            Finding(
                "not_ours",
                "warning",
                f"The draft {inspection.draft_name} is not of a kind that this package serves.",
                "Stock vLLM serves it, without this package's checks and defaults.",
            )
        )
    return sizes, sorted(findings, key=lambda finding: finding.severity != "error")


def target_weights(target: str) -> int | None:
    """Bytes of the target's weights from their headers; None where only its config is at hand."""
    from vllm_dflash.check.sizes import weight_bytes
    from vllm_dflash.checkpoint.hub import fetch_file, read_hub_tensors
    from vllm_dflash.checkpoint.safetensors_header import read_folder

    try:
        if Path(target).is_dir():
            return weight_bytes(read_folder(Path(target)).values())
        config = fetch_file(target, "config.json", None)
        if config is None:
            return None
        tensors, _ = read_hub_tensors(target, config.parent.name, config.parent)
        return weight_bytes(tensors.values())
    except CheckpointError:
        return None
