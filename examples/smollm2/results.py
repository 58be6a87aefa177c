# SPDX-License-Identifier: Apache-2.0
"""Plain decoding, stock's speculation and this package's, side by side on one machine.

    python -m examples.smollm2.results --dflash .demo/my-dflash
    python -m examples.smollm2.results --variants plain dflash2:2 dflash2:3 --concurrency 1 --kinds code
    python -m examples.smollm2.results --variants plain dflash2:3 --concurrency 1 --temperatures 0 --dtype float32

A variant is a name and, after a colon, how many tokens it drafts: `plain`, `ngram`, `stock-dflash`, `dflash` (both
need the folder of a DFlash drafter in --dflash), `dflash2`. All engines are up at once, each in a process of its own,
and take turns prompt group by prompt group, so that what else the machine does hits all of them alike. What is
measured is appended to --state and not measured again, so the command can be stopped and repeated. It ends by
printing Markdown tables; --table prints them from the state alone, --write puts them into a page, in place of all
from its first table on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.smollm2.data import TRAINING
from examples.smollm2.evaluate import counters, fixed_length
from examples.smollm2.generate import encode, read_prompts

BLOCK = 128
STOCK = ("plain", "ngram", "stock-dflash")
VARIANTS = ["plain", "ngram:3", "stock-dflash:3", "dflash:3", "dflash2:3"]


@dataclass(frozen=True)
class Variant:
    """One way to decode, and the engine arguments that make it."""

    name: str
    drafts: int
    drafter: Path | None

    @property
    def is_stock(self) -> bool:
        return self.name in STOCK

    @property
    def label(self) -> str:
        return f"{self.name}:{self.drafts}" if self.drafts else self.name

    def engine_arguments(self) -> dict[str, Any]:
        if self.name == "plain":
            return {}
        speculative: dict[str, Any] = {"num_speculative_tokens": self.drafts}
        if self.name == "ngram":
            return {"speculative_config": speculative | {"method": "ngram", "prompt_lookup_max": 4}}
        arguments = {"speculative_config": speculative | {"method": "dflash", "model": str(self.drafter)}}
        return arguments if self.is_stock else arguments | fixed_length(self.drafts)


@dataclass(frozen=True)
class Cell:
    """What is measured at once."""

    variant: str
    kind: str
    temperature: float
    concurrency: int
    round: int
    dtype: str


def parse_variant(text: str, drafters: dict[str, Path | None]) -> Variant:
    name, _, drafts = text.partition(":")
    if name not in ("plain", "ngram", *drafters) or (name != "plain") != drafts.isdigit():
        raise SystemExit(f"variant {text!r}: give plain, or one of ngram, {', '.join(drafters)} with a count: ngram:3.")
    if name in drafters and drafters[name] is None:
        raise SystemExit(f"variant {text!r} needs the folder of a DFlash drafter: --dflash FOLDER.")
    return Variant(name, int(drafts or 0), drafters.get(name))


def serve(pipe: Connection, variant: Variant, log: Path, arguments: dict[str, Any]) -> None:
    """The child process: one engine, which answers (prompts, temperature, concurrency, most tokens) until None."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["VLLM_PLUGINS"] = "" if variant.is_stock else "dflash"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    llm = LLM(**arguments, **variant.engine_arguments(), enforce_eager=True, disable_log_stats=False, seed=0)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        pipe.send(measure(llm, variant, *task))


def measure(
    llm: Any, variant: Variant, prompts: list[list[int]], temperature: float, concurrency: int, count: int
) -> dict[str, Any]:
    """Continue `prompts` (token ids), `concurrency` at a time: figures and, at T=0, the tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=temperature, max_tokens=count)
    before = counters(llm) if variant.drafts else (0, 0)
    waiting = list(enumerate(prompts))[::-1]
    tokens: dict[str, list[int]] = {}
    running = 0
    began = time.monotonic()
    while waiting or running:
        while waiting and running < concurrency:
            number, ids = waiting.pop()
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
            running += 1
        for output in llm.llm_engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                running -= 1
    seconds = time.monotonic() - began
    drafts, accepted = (after - b for after, b in zip(counters(llm) if variant.drafts else (0, 0), before, strict=True))
    made = sum(len(ids) for ids in tokens.values())
    texts = [tokens[str(number)] for number in range(len(prompts))]
    figures = {"tokens": made, "seconds": seconds, "drafts": drafts, "accepted": accepted}
    return figures | ({"texts": texts} if temperature == 0 else {})


def run(arguments: argparse.Namespace, variants: list[Variant]) -> None:
    """Measure every cell that the state lacks."""
    done = {cell for cell, _ in read_state(arguments.state)}
    wanted = [
        Cell(variant.label, kind, temperature, concurrency, number, arguments.dtype)
        for number, concurrency, temperature, kind, variant in product(
            range(arguments.rounds), arguments.concurrency, arguments.temperatures, arguments.kinds, variants
        )
    ]
    wanted = [cell for cell in wanted if cell not in done]
    if not wanted:
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    most = {c: max(c, arguments.each) for c in arguments.concurrency}
    prompts: dict[str, list[list[int]]] = {kind: [] for kind in arguments.kinds}
    for prompt in read_prompts(arguments.prompts):
        chosen = prompts.get(prompt["kind"])
        if chosen is not None and len(chosen) < max(most.values()):
            chosen.append(encode(tokenizer, prompt, 256))
    engine = {
        "model": str(arguments.target),
        "dtype": arguments.dtype,
        "max_model_len": 256 + arguments.max_tokens,
        "max_num_seqs": max(arguments.concurrency),
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 1024,
        "block_size": BLOCK,
        # All engines stand in memory at once: no more cache than the requests fill, the draft's included.
        "num_gpu_blocks_override": 2 * max(arguments.concurrency) * (2 + (256 + arguments.max_tokens) // BLOCK),
    }
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    children = []
    needed = {cell.variant for cell in wanted}
    for variant in tqdm([v for v in variants if v.label in needed], desc="start", unit="engine"):
        pipe, remote = context.Pipe()
        log = arguments.state.with_suffix(f".{variant.label.replace(':', '-')}.log")
        child = context.Process(target=serve, args=(remote, variant, log, engine), daemon=True)
        child.start()
        remote.close()
        children.append(child)
        pipes[variant.label] = pipe
        try:
            pipe.recv()
            pipe.send((next(iter(prompts.values()))[:1], 0.0, 1, 16))  # its first steps are slower
            pipe.recv()
        except EOFError:
            raise SystemExit(f"the engine of {variant.label} ended; what it said is in {log}.") from None
    with arguments.state.open("a") as state:
        for cell in tqdm(wanted, desc="measure", unit="cell", mininterval=2):
            chosen = prompts[cell.kind][: most[cell.concurrency]]
            pipes[cell.variant].send((chosen, cell.temperature, cell.concurrency, arguments.max_tokens))
            try:
                figures = pipes[cell.variant].recv()
            except EOFError:
                raise SystemExit(f"the engine of {cell.variant} ended; its log is beside {arguments.state}.") from None
            state.write(json.dumps({"cell": asdict(cell), "figures": figures}) + "\n")
            state.flush()
    for pipe in pipes.values():
        pipe.send(None)
    for child in children:
        child.join()


def read_state(path: Path) -> list[tuple[Cell, dict[str, Any]]]:
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(Cell(**record["cell"]), record["figures"]) for record in records]


def tables(measured: list[tuple[Cell, dict[str, Any]]]) -> str:
    """Markdown: a table a temperature and kind, tokens/s (against plain) at each concurrency, acceptance length."""
    groups: dict[tuple[str, float, str], list[tuple[Cell, dict[str, Any]]]] = {}
    for cell, figures in measured:
        groups.setdefault((cell.dtype, cell.temperature, cell.kind), []).append((cell, figures))
    return "\n".join(table(*group, cells) for group, cells in sorted(groups.items()))


def table(dtype: str, temperature: float, kind: str, cells: list[tuple[Cell, dict[str, Any]]]) -> str:
    concurrencies = sorted({cell.concurrency for cell, _ in cells})
    labels = list(dict.fromkeys(cell.variant for cell, _ in cells))
    plain_texts = {
        (cell.concurrency, i): text
        for cell, figures in cells
        if cell.variant == "plain"
        for i, text in enumerate(figures.get("texts", []))
    }

    def rate(label: str, concurrency: int) -> float:
        chosen = [f for c, f in cells if (c.variant, c.concurrency) == (label, concurrency)]
        return sum(f["tokens"] for f in chosen) / sum(f["seconds"] for f in chosen) if chosen else 0.0

    same = temperature == 0 and bool(plain_texts)
    lines = [
        f"### {kind}, T={temperature:g}, {dtype}\n",
        "| | " + " | ".join(f"tokens/s at {c}" for c in concurrencies) + " | acceptance length |"
        + (" texts as plain's |" if same else ""),
        "|---|" + "---|" * (len(concurrencies) + 1 + same),
    ]
    for label in labels:
        row = [label]
        for concurrency in concurrencies:
            mine, plain = rate(label, concurrency), rate("plain", concurrency)
            against = f" ({mine / plain:.2f}×)" if plain and mine and label != "plain" else ""
            row.append(f"{mine:.0f}{against}" if mine else "")
        mine_cells = [(c, f) for c, f in cells if c.variant == label]
        drafts = sum(f["drafts"] for _, f in mine_cells)
        row.append(f"{1 + sum(f['accepted'] for _, f in mine_cells) / drafts:.2f}" if drafts else "")
        if same:
            equal = [
                plain_texts[c.concurrency, i] == text
                for c, f in mine_cells
                for i, text in enumerate(f["texts"])
                if (c.concurrency, i) in plain_texts
            ]
            row.append(f"{sum(equal)} of {len(equal)}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--drafter", type=Path, default=Path(".demo/drafter"), help="DFlash 2")
    parser.add_argument("--dflash", type=Path, help="folder of a DFlash drafter")
    parser.add_argument("--prompts", type=Path, default=TRAINING / "held-out.jsonl")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--kinds", nargs="+", default=["code", "code_chat", "chat", "json"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--each", type=int, default=6, help="prompts of a kind, or as many as run at once")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--state", type=Path, default=Path(".demo/results.jsonl"))
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables of --state")
    parser.add_argument("--write", type=Path, help="a Markdown page to put the tables into")
    arguments = parser.parse_args(argv)
    drafters = {"stock-dflash": arguments.dflash, "dflash": arguments.dflash, "dflash2": arguments.drafter}
    if not arguments.table:
        run(arguments, [parse_variant(text, drafters) for text in arguments.variants])
    text = tables(read_state(arguments.state))
    print(text)
    if arguments.write is not None:
        before = arguments.write.read_text().split("\n### ")[0].rstrip("\n")
        arguments.write.write_text(f"{before}\n\n{text}")


if __name__ == "__main__":
    main()
