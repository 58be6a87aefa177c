# SPDX-License-Identifier: Apache-2.0
"""What a run consists of: groups that are compared, and cells, one load on one group each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_dflash.checkpoint import parse_config, read_draft_config

PLAIN = "plain"


@dataclass(frozen=True)
class Group:
    """One way to serve the target. stock: without this package, by VLLM_PLUGINS=""."""

    name: str
    speculative: dict[str, Any] | None = None
    stock: bool = True
    arguments: tuple[str, ...] = ()

    def serve_arguments(self) -> list[str]:
        """What is added to `vllm serve TARGET`."""
        speculative = [] if self.speculative is None else ["--speculative-config", json.dumps(self.speculative)]
        return [*speculative, *self.arguments]


@dataclass(frozen=True)
class Cell:
    """One measurement: a load on a group's server. kind: "load", "agreement" or "break_even".

    context: (name, tokens before the prompt); output: the most tokens an answer has.
    """

    group: str
    repeat: int
    kind: str = "load"
    workload: str = ""
    context: tuple[str, int] = ("short", 0)
    output: int = 0
    concurrency: int = 1
    temperature: float = 0.0

    @property
    def key(self) -> str:
        """What tells this cell from all others, the same in every run of the same settings."""
        return json.dumps(asdict(self), sort_keys=True)

    def __str__(self) -> str:
        if self.kind != "load":
            return f"{self.group}: {self.kind.replace('_', '-')}"
        load = f"{self.workload}, {self.context[0]} context, {self.output} tokens"
        return f"{self.group}: {load}, {self.concurrency} at once, T={self.temperature:g}"


@dataclass(frozen=True)
class Matrix:
    """The loads: every combination is a cell."""

    workloads: Sequence[str]
    contexts: Sequence[tuple[str, int]]
    outputs: Sequence[int]
    concurrencies: Sequence[int]
    temperatures: Sequence[float]

    def cells(self, group: str, repeat: int) -> Iterator[Cell]:
        for load in itertools.product(
            self.workloads, self.contexts, self.outputs, self.temperatures, self.concurrencies
        ):
            workload, context, output, temperature, concurrency = load
            yield Cell(group, repeat, "load", workload, context, output, concurrency, temperature)


@dataclass
class Rounds:
    """The run in order: each repeat goes over all groups, and begins with another one."""

    groups: Sequence[Group]
    repeats: int
    matrix: Matrix
    agreement: bool = True
    break_even: Sequence[Group] = field(default_factory=tuple)

    def __iter__(self) -> Iterator[tuple[Group, list[Cell]]]:
        """(group, the cells to measure on one start of its server)."""
        for repeat in range(self.repeats):
            turn = repeat % len(self.groups)
            for group in (*self.groups[turn:], *self.groups[:turn]):
                cells = list(self.matrix.cells(group.name, repeat))
                if self.agreement and repeat == 0:
                    cells.insert(0, Cell(group.name, repeat, "agreement"))
                yield group, cells
        for group in self.break_even:
            yield group, [Cell(group.name, 0, "break_even")]


def draft_group(draft: str, names: set[str]) -> tuple[str, int, bool]:
    """(name such as "dflash2", its K, whether it is DFlash 2) of a draft checkpoint. Raises CheckpointError."""
    config = parse_config(read_draft_config(draft), num_target_layers=1024)
    kind = "dflash2" if config.is_dflash2 else "dflash"
    name, number = kind, 2
    while name in names:
        name, number = f"{kind}-{number}", number + 1
    return name, config.num_draft_tokens, config.is_dflash2


def groups_of(
    drafts: Sequence[str],
    *,
    draft_model: str | None = None,
    eagle3: str | None = None,
    ngram_tokens: int = 4,
    draft_tokens: int | None = None,
) -> list[Group]:
    """Plain decoding, ngram, what else was named, and for each draft stock's serving and this package's.

    draft_tokens: K of the DFlash groups, None for what each checkpoint's block gives. Raises CheckpointError.
    """
    groups = [
        Group(PLAIN),
        Group("ngram", {"method": "ngram", "num_speculative_tokens": ngram_tokens, "prompt_lookup_max": 4}),
    ]
    if draft_model is not None:
        config = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": 4}
        groups.append(Group("draft-model", config))
    if eagle3 is not None:
        groups.append(Group("eagle3", {"method": "eagle3", "model": eagle3, "num_speculative_tokens": 4}))
    for draft in drafts:
        name, k, _ = draft_group(draft, {group.name for group in groups})
        config = {"method": "dflash", "model": draft}
        wanted = draft_tokens or k
        groups.append(Group(f"stock-{name}", config | {"num_speculative_tokens": wanted}))
        own = config if draft_tokens is None else config | {"num_speculative_tokens": draft_tokens}
        groups.append(Group(name, own, stock=False))
    return groups


def synthetic(group: Group, length: float, tokens: int) -> Group:
    """The group with drafts accepted at a set mean length instead of by their worth, as stock vLLM can."""
    config = {
        **(group.speculative or {}),
        "num_speculative_tokens": tokens,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
    }
    # The server's controller would answer to the acceptance that is set; here every step drafts all.
    fixed = ("--additional-config", json.dumps({"dflash": {"block_length": tokens}}))
    return Group(f"{group.name}@{length:g}", config, group.stock, (*group.arguments, *fixed))
