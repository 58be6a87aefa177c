# SPDX-License-Identifier: Apache-2.0
"""What crosses from one step to the next: the drafted blocks and the sparse q they were drawn from."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class DraftBlock:
    """The drafts of B requests, keyed by request because the batch is reordered between steps.

    request_ids: B ids, row b belongs to request_ids[b].
    token_ids: [B, K] int64, -1 where there is no draft.
    candidate_ids: [B, K, C] int64 and candidate_logits: [B, K, C] fp32, unnormalised log q, already over T where
    T > 0. None when the drafts were not sampled: q is then one-hot.
    planned: B numbers of drafts, as decided before they were drawn; None: K each.
    """

    request_ids: Sequence[str]
    token_ids: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    candidate_logits: torch.Tensor | None = None
    planned: Sequence[int] | None = None

    @property
    def width(self) -> int:
        """K, the drafts a request."""
        return self.token_ids.shape[1]

    def without(self, request_ids: Collection[str], alive: Container[str]) -> "DraftBlock | None":
        """The rows of requests that are `alive` and not among `request_ids`: their drafts still wait to be verified."""
        rows = [r for r, i in enumerate(self.request_ids) if i not in request_ids and i in alive]
        if not rows:
            return None
        at = torch.tensor(rows, device=self.token_ids.device)
        return DraftBlock(
            [self.request_ids[r] for r in rows],
            self.token_ids[at],
            None if self.candidate_ids is None else self.candidate_ids[at],
            None if self.candidate_logits is None else self.candidate_logits[at],
            None if self.planned is None else [self.planned[r] for r in rows],
        )

    def with_rows(self, other: "DraftBlock | None") -> "DraftBlock":
        """This block and, after it, the rows of another of the same K and C."""
        if other is None:
            return self
        sparse: list[torch.Tensor | None] = [None, None]
        if self.candidate_ids is not None and self.candidate_logits is not None:
            assert other.candidate_ids is not None and other.candidate_logits is not None
            sparse = [
                torch.cat([self.candidate_ids, other.candidate_ids]),
                torch.cat([self.candidate_logits, other.candidate_logits]),
            ]
        tokens = torch.cat([self.token_ids, other.token_ids])
        planned = [block.planned_for(i) for block in (self, other) for i in block.request_ids]
        return DraftBlock([*self.request_ids, *other.request_ids], tokens, sparse[0], sparse[1], planned)

    def planned_for(self, request_id: str) -> int:
        """How many drafts a request of this block was to get, before any was drawn."""
        return self.width if self.planned is None else self.planned[self._row_of[request_id]]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {request_id: row for row, request_id in enumerate(self.request_ids)}

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[B] int64: drafts before the first "no draft"."""
        return (self.token_ids >= 0).to(torch.int64).cumprod(dim=1).sum(dim=1)

    def slots(self, request_ids: Sequence[str], counts: Sequence[int]) -> list[int]:
        """Flat indices into [B*K] of the first counts[i] slots of each request, -1 for a request without a block.

        counts[i] may be 0. Slots past the block's width are -1 too: nothing was drafted there.
        """
        flat: list[int] = []
        for request_id, count in zip(request_ids, counts, strict=True):
            row = self._row_of.get(request_id)
            known = 0 if row is None else min(count, self.width)
            if known:
                assert row is not None
                flat.extend(range(row * self.width, row * self.width + known))
            flat.extend([-1] * (count - known))
        return flat

    def q(self, draft_ids: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sparse q of drafts [N] at flat `slots` [N] -> (candidate_ids [N, C] int64, log q [N, C] fp32).

        A draft that this block did not draw here (slot -1, or another token) was not sampled by it: its q is one-hot.
        """
        if self.candidate_ids is None or self.candidate_logits is None:
            return draft_ids.unsqueeze(1), torch.zeros(draft_ids.shape[0], 1, device=draft_ids.device)
        at = slots.clamp(min=0)
        drawn = (slots >= 0) & (self.token_ids.flatten()[at] == draft_ids)
        ids = self.candidate_ids.flatten(0, 1)[at]
        logits = self.candidate_logits.flatten(0, 1)[at]
        first = torch.arange(ids.shape[1], device=ids.device) == 0
        one_hot_ids = torch.where(first, draft_ids.unsqueeze(1), -1)
        one_hot_logits = torch.where(first, 0.0, float("-inf"))
        keep = drawn.unsqueeze(1)
        return torch.where(keep, ids, one_hot_ids), torch.where(keep, logits, one_hot_logits)
