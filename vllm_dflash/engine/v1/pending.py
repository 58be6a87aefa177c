# SPDX-License-Identifier: Apache-2.0
"""Context of steps without drafts: kept as features, and written as draft KV, many steps at once, before it is read.

A few rows a step cost the drafter's context weights as much memory traffic as a hundred do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine.v1.attention import DraftAttentionGroups

# Rows that are written at once: many enough to be cheap, few enough that the step which writes them is not long.
ROWS = 128
# Steps that rows are kept at most.
STEPS = 64


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
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.drafter = drafter
        self.attention = attention
        specs = [group.stock.kv_cache_spec for group in attention.groups]
        windows = [getattr(spec, "sliding_window", None) or STEPS + 1 for spec in specs]
        self.most_steps = min(STEPS, min(windows) - 1)
        capacity = max(ROWS, max_requests)
        self.features = torch.empty(capacity, drafter.feature_size, dtype=dtype, device=device)
        self.positions = torch.empty(capacity, dtype=torch.int64, device=device)
        self.slots = [torch.empty(capacity, dtype=torch.int64, device=device) for _ in attention.groups]
        self.rows = 0
        self.members: set[str] = set()
        self.steps: list[tuple[list[str], list[int]]] = []
        """A step: its requests and their rows' positions, one each."""

    def has_room(self, rows: int) -> bool:
        """Whether a step of so many rows may still be kept."""
        return self.rows + rows <= self.features.shape[0] and len(self.steps) < self.most_steps

    @property
    def is_due(self) -> bool:
        """Whether the rows are to be written at the end of this step."""
        return self.rows >= ROWS or len(self.steps) >= self.most_steps

    def keep(
        self,
        taps: Sequence[torch.Tensor],
        positions: torch.Tensor,
        block_tables: Any,
        request_ids: list[str],
        host_positions: list[int],
    ) -> None:
        """One row of each request: taps, F of [B, Ht], at positions [B]. block_tables: the runner's, with the slots of
        this step's rows."""
        first, self.rows = self.rows, self.rows + len(request_ids)
        torch.cat(list(taps), dim=-1, out=self.features[first : self.rows])
        self.positions[first : self.rows] = positions
        for group, slots in zip(self.attention.groups, self.slots, strict=True):
            slots[first : self.rows] = block_tables[group.kv_cache_gid].slot_mapping.gpu[: len(request_ids)]
        if not self.steps:
            self.members = set(request_ids)
        self.steps.append((list(request_ids), host_positions))

    def write(self) -> None:
        """The draft KV of all rows that are kept; kept they are still."""
        rows = self.rows
        features = self.drafter.combine_hidden_states(self.features[:rows])
        self.attention.write_slots(features, self.positions[:rows], [slots[:rows] for slots in self.slots])

    def spans(self) -> dict[str, tuple[int, int]]:
        """The positions [first, end) that are kept of each request."""
        spans: dict[str, tuple[int, int]] = {}
        for request_ids, positions in self.steps:
            for request_id, position in zip(request_ids, positions, strict=True):
                spans[request_id] = spans.get(request_id, (position, 0))[0], position + 1
        return spans

    def clear(self) -> None:
        self.rows = 0
        self.members = set()
        self.steps.clear()
