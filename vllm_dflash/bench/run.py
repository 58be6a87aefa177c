# SPDX-License-Identifier: Apache-2.0
"""A run from its first server to its last, cell by cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_dflash.bench import agreement
from vllm_dflash.bench.load import Traffic, measure
from vllm_dflash.bench.plan_of_run import PLAIN, Cell, Group, Rounds
from vllm_dflash.bench.prompts import with_context
from vllm_dflash.bench.server import BenchError, Server
from vllm_dflash.bench.store import Store

AGREEMENT_TOKENS = 64


@dataclass
class Run:
    """Everything a run needs. prompts: workload -> prompts; count: prompts a cell, at least one a stream.

    failures: group -> why its server did not start or died; plain decoding's failure ends the run instead.
    """

    target: str
    rounds: Rounds
    prompts: Mapping[str, Sequence[str]]
    traffic: Traffic
    serve_arguments: Sequence[str]
    store: Store
    count: int
    port: int | None = None
    failures: dict[str, str] = field(default_factory=dict)
    kv_tokens: dict[str, int | None] = field(default_factory=dict)

    def go(self) -> None:
        """Measure what the store does not have yet."""
        rounds = [(group, cells) for group, cells in self.rounds]
        progress = Progress(sum(len(cells) for _, cells in rounds))
        for group, cells in rounds:
            waiting = [cell for cell in cells if cell not in self.store]
            progress.skip(len(cells) - len(waiting))
            if not waiting:
                continue
            if group.name in self.failures:
                progress.skip(len(waiting))
                continue
            try:
                self._serve(group, waiting, progress)
            except BenchError as error:
                if group.name == PLAIN:
                    raise
                self.failures[group.name] = str(error)
                progress.note(f"{group.name} is left out: {str(error).splitlines()[0]}")
                progress.skip(len(cells) - sum(cell in self.store for cell in cells))
        progress.end()

    def _serve(self, group: Group, cells: Sequence[Cell], progress: Progress) -> None:
        log = self.store.folder / "logs" / f"{group.name}-{cells[0].repeat}.log"
        arguments = [*self.serve_arguments, *group.serve_arguments()]
        with Server(
            self.target,
            group.name,
            arguments,
            log,
            stock=group.stock,
            port=self.port,
            waiting=lambda seconds: progress.show(f"{group.name}: server starting, {seconds:.0f} s"),
        ) as server:
            self.kv_tokens[group.name] = server.kv_tokens()
            for cell in cells:
                progress.begin(str(cell))
                if cell.kind == "agreement":
                    made = {"answers": self._answers(server, cell)}
                else:
                    load = self._load_of(cell)
                    made = measure(server, load, self._prompts(load), self.traffic, self.store.folder)
                self.store.add(cell, made | {"kv_tokens": server.kv_tokens()})
                progress.done()

    def _load_of(self, cell: Cell) -> Cell:
        """The load of a break-even cell is plain decoding's first one."""
        return cell if cell.kind == "load" else next(self.rounds.matrix.cells(cell.group, cell.repeat))

    def _prompts(self, cell: Cell) -> list[str]:
        count = max(self.count, cell.concurrency)
        return with_context(self.prompts[cell.workload], cell.context[1], count)

    def _answers(self, server: Server, cell: Cell) -> list[dict[str, object]]:
        asked = [prompts[0] for prompts in self.prompts.values()]
        tokens = min(AGREEMENT_TOKENS, max(self.rounds.matrix.outputs))
        return agreement.answers(server, asked, tokens, self.traffic, logprobs=cell.group == PLAIN)


class Progress:
    """A bar on a terminal; elsewhere a line a cell."""

    WIDTH = 24

    def __init__(self, total: int) -> None:
        self.total, self.finished, self.measured, self.spent = total, 0, 0, 0.0
        self.text, self.began = "", time.monotonic()
        self.terminal = sys.stderr.isatty()

    def begin(self, text: str) -> None:
        self.text, self.began = text, time.monotonic()
        self.show(text)

    def show(self, text: str) -> None:
        if not self.terminal:
            return
        filled = round(self.WIDTH * self.finished / max(1, self.total))
        bar = "#" * filled + "." * (self.WIDTH - filled)
        print(
            f"\r\x1b[K[{bar}] {self.finished}/{self.total} {text}{self._left()}"[:150],
            end="",
            file=sys.stderr,
            flush=True,
        )

    def done(self) -> None:
        took = time.monotonic() - self.began
        self.finished, self.measured, self.spent = self.finished + 1, self.measured + 1, self.spent + took
        if not self.terminal:
            print(f"{self.finished}/{self.total} {self.text}: {took:.0f} s", file=sys.stderr, flush=True)

    def skip(self, count: int) -> None:
        self.finished += count

    def note(self, text: str) -> None:
        print(("\r\x1b[K" if self.terminal else "") + text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _left(self) -> str:
        if not self.measured:
            return ""
        minutes = self.spent / self.measured * (self.total - self.finished) / 60
        return f", about {minutes:.0f} min left"
