# SPDX-License-Identifier: Apache-2.0
"""Context of steps without drafts: kept as features, and written as draft KV, many steps at once, before it is read.

A few rows a step cost the drafter's context weights as much memory traffic as a hundred do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine.v1.attention import DraftAttentionGroups

# Rows that are written at once: many enough to be cheap, few enough that the step which writes them is not long.
ROWS = 128
# Steps that rows are kept at most.
STEPS = 64


class _Kept(NamedTuple):
    """A step: its B requests, the positions of their rows, one each, and of these the taps and, a group, the slots."""

    request_ids: list[str]
    positions: list[int]
    taps: list[torch.Tensor]
    slots: list[torch.Tensor]
    rotary_positions: torch.Tensor | None


class PendingContext:
    """Rows of the target's features whose draft KV is not written yet, each with the slots that were its own then.

    A slot is its request's until the scheduler gives the block to another one, so the rows must be written before the
    first step that a request enters or leaves, and before anything of that step is. A block that slides out of a
    window goes without such a sign: there rows are kept for fewer steps than the window is long.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        attention: DraftAttentionGroups,
        max_requests: int,
        device: torch.device,
    ) -> None:
        self.drafter = drafter
        self.attention = attention
        self.device = device
        specs = [group.stock.kv_cache_spec for group in attention.groups]
        windows = [getattr(spec, "sliding_window", None) or STEPS + 1 for spec in specs]
        self.most_steps = min(STEPS, min(windows) - 1)
        self.most_rows = max(ROWS, max_requests)
        self.rows = 0
        self.members: set[str] = set()
        self.steps: list[_Kept] = []

    def has_room(self, rows: int) -> bool:
        """Whether a step of so many rows may still be kept."""
        return self.rows + rows <= self.most_rows and len(self.steps) < self.most_steps

    @property
    def is_due(self) -> bool:
        """Whether the rows are to be written at the end of this step."""
        return self.rows >= ROWS or len(self.steps) >= self.most_steps

    def keep(
        self,
        taps: Sequence[torch.Tensor],
        block_tables: Any,
        request_ids: list[str],
        positions: list[int],
        rotary_positions: torch.Tensor | None = None,
    ) -> None:
        """One row of each request: taps, F of [>= B, Ht], at `positions`. block_tables: the runner's, with the slots of
        this step's rows. rotary_positions: [>= B] int64, where they are others."""
        count = len(request_ids)
        self.rows += count
        # The memory of a captured graph is the next step's too; what a CPU's step computed is its own.
        if self.device.type != "cpu":
            taps = [torch.cat([tap[:count] for tap in taps], dim=-1)]
        if rotary_positions is not None:
            rotary_positions = rotary_positions[:count].clone()
        slots = [block_tables[group.kv_cache_gid].slot_mapping.gpu[:count].clone() for group in self.attention.groups]
        if not self.steps:
            self.members = set(request_ids)
        self.steps.append(_Kept(list(request_ids), positions, list(taps), slots, rotary_positions))

    def write(self) -> None:
        """The draft KV of all rows that are kept; kept they are still."""
        steps = self.steps
        taps = [torch.cat([tap[: len(step.request_ids)] for tap in step.taps], dim=-1) for step in steps]
        features = self.drafter.combine_hidden_states(torch.cat(taps))
        rotary_positions = [step.rotary_positions for step in steps if step.rotary_positions is not None]
        if rotary_positions:
            positions = torch.cat(rotary_positions)
        else:
            positions = torch.tensor([position for step in steps for position in step.positions])
            positions = positions.to(self.device, non_blocking=True)
        slots = [torch.cat(of_group) for of_group in zip(*(step.slots for step in steps), strict=True)]
        self.attention.write_slots(features, positions, slots)

    def spans(self) -> dict[str, tuple[int, int]]:
        """The positions [first, end) that are kept of each request."""
        spans: dict[str, tuple[int, int]] = {}
        for step in self.steps:
            for request_id, position in zip(step.request_ids, step.positions, strict=True):
                spans[request_id] = spans.get(request_id, (position, 0))[0], position + 1
        return spans

    def clear(self) -> None:
        self.rows = 0
        self.members = set()
        self.steps.clear()
