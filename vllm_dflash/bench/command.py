# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench`: arguments, the run, its files."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_dflash import __version__

CONTEXTS = {"short": 0, "medium": 2000, "long": 16000}
EPILOG = """\
Arguments after -- go to every server, for example: -- --max-model-len 8192 --gpu-memory-utilization 0.85
Groups: plain, ngram, draft-model and eagle3 where given, and for each DRAFT stock-dflash(2) (vLLM without this
package) and dflash(2). A group whose server does not start is left out, and the result says why.
Finished cells are on the disk at once; the same command goes on where an interrupted one was.

exit status: 0 done; 1 plain decoding could not be measured; 2 wrong arguments; 130 interrupted.
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="vllm-dflash bench",
        usage="vllm-dflash bench TARGET [DRAFT ...] [options] [-- vllm serve's arguments]",
        description="Measure a target with its drafters against plain decoding and other methods: servers are started\n"
        "and stopped one after the other, the load comes from `vllm bench serve`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("target", metavar="TARGET", help="a folder or a hub id")
    made.add_argument("drafts", metavar="DRAFT", nargs="*", help="DFlash drafters (default: from the catalogue)")
    made.add_argument("--out", metavar="DIR", type=Path, default=Path("bench-result"), help="default: bench-result")
    groups = made.add_argument_group("groups")
    groups.add_argument("--groups", metavar="NAME,NAME", help="only these (plain is always measured)")
    groups.add_argument("--draft-model", metavar="MODEL", help="a small autoregressive draft model")
    groups.add_argument("--eagle3", metavar="MODEL", help="an EAGLE-3 head")
    groups.add_argument("--ngram-tokens", metavar="K", type=int, default=4, help="default: 4")
    groups.add_argument(
        "--draft-tokens", metavar="K", type=int, help="drafts of the DFlash groups (default: the block's)"
    )
    load = made.add_argument_group("load")
    load.add_argument("--prompts", metavar="FILE", type=Path, help='JSONL of {"prompt": ..., "workload": ...}')
    load.add_argument("--workloads", metavar="NAME,NAME", help="of code, chat, json, sql, tools, prose (default: all)")
    load.add_argument(
        "--contexts", metavar="NAME,NAME", default="short", help="of short, medium (2000), long (16000 tokens)"
    )
    load.add_argument("--output-tokens", metavar="N,N", default="256", help="the longest answers (default: 256)")
    load.add_argument("--concurrency", metavar="N,N", default="1,8", help="requests at once (default: 1,8)")
    load.add_argument("--temperature", metavar="T,T", default="0,1", help="default: 0,1")
    load.add_argument("--count", metavar="N", type=int, default=16, help="requests a cell (default: 16)")
    load.add_argument("--repeats", metavar="N", type=int, default=3, help="default: 3, interleaved")
    load.add_argument(
        "--thinking", choices=("on", "off"), default="off", help="where the template has it (default: off)"
    )
    load.add_argument("--raw", action="store_true", help="no chat template")
    load.add_argument("--ignore-eos", action="store_true", help="answers of full length, whatever the model says")
    load.add_argument(
        "--prefix-caching", action="store_true", help="leave it on; prompts repeat, so it is off by default"
    )
    more = made.add_argument_group("more")
    more.add_argument("--no-agreement", action="store_true", help="do not compare answers with plain decoding's")
    more.add_argument("--break-even", action="store_true", help="also measure at set acceptance lengths (GPUs)")
    more.add_argument("--port", metavar="N", type=int, help="of the servers (default: a free one)")
    return made


def run(argv: Sequence[str]) -> int:
    """`vllm-dflash bench`; the exit code."""
    from vllm_dflash.bench.server import BenchError
    from vllm_dflash.checkpoint import CheckpointError

    arguments = list(argv)
    serve: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, serve = arguments[:at], arguments[at + 1 :]
    made = parser()
    options = made.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        job = prepare(options, serve)
    except (BenchError, CheckpointError, ValueError) as error:
        made.error(str(error))
    for name, value in told(job.store.settings):
        print(f"{name:<16} {value}")
    code = 0
    try:
        job.go()
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; {len(job.store.cells)} cells are in {options.out}, the same command goes on.",
            file=sys.stderr,
        )
        code = 130
    except BenchError as error:
        print(f"\n{error}", file=sys.stderr)
        code = 1
    if job.store.cells:
        write(job)
    return code


def prepare(options: argparse.Namespace, serve: Sequence[str]):  # type: ignore[no-untyped-def]
    """The Run that the arguments describe. Raises BenchError, CheckpointError or ValueError, sentences."""
    from vllm_dflash.bench import plan_of_run
    from vllm_dflash.bench.load import Traffic
    from vllm_dflash.bench.prompts import read_prompts
    from vllm_dflash.bench.run import Run
    from vllm_dflash.bench.server import choose_port, require_device
    from vllm_dflash.bench.store import Store
    from vllm_dflash.bench.template import find_template
    from vllm_dflash.checkpoint import find_draft, read_draft_config

    machine = require_device(version("vllm"))
    for model in (options.target, options.draft_model, options.eagle3):
        if model is not None:
            read_draft_config(model)  # one that is missing is told before anything starts
    if options.port is not None:
        choose_port(options.port)
    drafts = options.drafts
    if not drafts:
        entry = find_draft(options.target)
        drafts = [] if entry is None else [entry.draft]
    groups = plan_of_run.groups_of(
        drafts,
        draft_model=options.draft_model,
        eagle3=options.eagle3,
        ngram_tokens=options.ngram_tokens,
        draft_tokens=options.draft_tokens,
    )
    if options.groups:
        wanted = options.groups.split(",")
        known = [group.name for group in groups]
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise ValueError(f"There is no group {unknown[0]} here; there are {', '.join(known)}.")
        groups = [group for group in groups if group.name in ("plain", *wanted)]
    prompts = read_prompts(options.prompts)
    if options.workloads:
        unknown = [name for name in options.workloads.split(",") if name not in prompts]
        if unknown:
            raise ValueError(f"There is no workload {unknown[0]} among the prompts; there are {', '.join(prompts)}.")
        prompts = {name: prompts[name] for name in options.workloads.split(",")}
    contexts = _contexts(options.contexts)
    matrix = plan_of_run.Matrix(
        list(prompts),
        contexts,
        _numbers("--output-tokens", options.output_tokens, int),
        _numbers("--concurrency", options.concurrency, int),
        _numbers("--temperature", options.temperature, float),
    )
    synthetic = []
    # vLLM has no synthetic acceptance on a CPU; there the cycle over a plain step tells the break-even.
    if options.break_even and not machine.startswith("CPU"):
        for group in groups:
            if group.name.startswith("dflash") and group.speculative is not None:
                k = group.speculative.get("num_speculative_tokens") or _block(group.speculative["model"])
                synthetic += [plan_of_run.synthetic(group, length, k) for length in (1.0, (1 + k) / 2)]
    template = find_template(options.target, options.thinking == "on", options.raw)
    serve_arguments = [*serve, *([] if options.prefix_caching else ["--no-enable-prefix-caching"])]
    settings: dict[str, Any] = {
        "target": options.target,
        "drafts": drafts,
        "groups": [[group.name, group.speculative, group.stock] for group in (*groups, *synthetic)],
        "workloads": matrix.workloads,
        "contexts": [list(context) for context in contexts],
        "output_tokens": matrix.outputs,
        "concurrency": matrix.concurrencies,
        "temperature": matrix.temperatures,
        "count": options.count,
        "repeats": options.repeats,
        "template": template.told,
        "ignore_eos": options.ignore_eos,
        "prompts": "shipped" if options.prompts is None else str(options.prompts),
        "serve_arguments": serve_arguments,
        "machine": f"{machine}, {platform.machine()}, Python {platform.python_version()}",
        "vllm": version("vllm"),
        "package": __version__,
    }
    traffic = Traffic(options.target, template.mode, template.arguments, options.ignore_eos)
    rounds = plan_of_run.Rounds(groups, options.repeats, matrix, not options.no_agreement, synthetic)
    store = Store(options.out, settings)
    return Run(options.target, rounds, prompts, traffic, serve_arguments, store, options.count, options.port)


def write(job: Any) -> None:
    """result.json, result.md and result.html of what was measured so far."""
    from vllm_dflash.bench import report
    from vllm_dflash.bench.summary import summarise

    folder = job.store.folder
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    result = summarise(list(job.store.cells.values()), job.store.settings | {"date": date}, job.failures)
    (folder / "result.json").write_text(json.dumps(result, indent=2))
    (folder / "result.md").write_text(report.as_markdown(result))
    (folder / "result.html").write_text(report.as_html(result))
    print(f"\n{folder / 'result.json'}, result.md and result.html are written.")
    for line in report.break_even_lines(result):
        print(line)
    for group, why in job.failures.items():
        print(f"left out: {group}: {why}")


def told(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """What is fixed for all groups, printed before the run."""
    names = ("target", "drafts", "template", "machine", "vllm", "prompts", "serve_arguments")
    listed = [(name.replace("_", " "), settings[name]) for name in names]
    groups = ", ".join(group[0] for group in settings["groups"])
    return [(name, " ".join(v) if isinstance(v, list) else str(v)) for name, v in listed] + [("groups", groups)]


def _block(draft: str) -> int:
    from vllm_dflash.bench.plan_of_run import draft_group

    return draft_group(draft, set())[1]


def _contexts(text: str) -> list[tuple[str, int]]:
    """Names of CONTEXTS, or numbers of tokens."""
    made = []
    for name in text.split(","):
        if name not in CONTEXTS and not name.isdecimal():
            raise ValueError(f"--contexts has {name!r}; it takes {', '.join(CONTEXTS)} or a number of tokens.")
        made.append((name, CONTEXTS[name] if name in CONTEXTS else int(name)))
    return made


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it takes numbers with commas between them.") from None
    if min(values) < (1 if kind is int else 0):
        raise ValueError(f"{name} is {text!r}; the smallest is {1 if kind is int else 0}.")
    return values
