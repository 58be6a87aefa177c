# SPDX-License-Identifier: Apache-2.0
"""SpecDecodeWorker: verify, inject, draft and select for the scheduler's whole batch at once."""

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_dflash.spec_decode.draft_block import DraftBlock
from vllm_dflash.spec_decode.verification import VerifyInputs, verify


class Drafter(Protocol):
    """The draft network, as far as a step needs it (`drafter.model.DFlashDrafter` is one)."""

    @property
    def has_selector(self) -> bool: ...

    def context_kv(self, taps: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def candidates(self, hidden: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def select(
        self,
        hidden: torch.Tensor,
        candidate_ids: torch.Tensor,
        candidate_logits: torch.Tensor,
        anchors: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        anchor_positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class Anchors:
    """The B requests to draft for: each one's last verified token and how it samples.

    token_ids, positions: [B] int64 (position = number of context tokens). temperature: [B] fp32, 0 is greedy.
    seeds: [B] int64. limit: the first position that a draft may not take, e.g. the longest sequence.
    """

    request_ids: Sequence[str]
    token_ids: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    limit: int

    def select(self, request_ids: Sequence[str], rows: torch.Tensor) -> "Anchors":
        """The anchors of some rows [b] int64, whose ids are request_ids."""
        return Anchors(
            request_ids,
            self.token_ids[rows],
            self.positions[rows],
            self.temperature[rows],
            self.seeds[rows],
            self.limit,
        )


class SpecDecodeWorker:
    """One draft and verify cycle over a batch. An adapter gives it the engine's tensors and runs its forward.

    Args:
        drafter: the draft network.
        mask_token_id: what stands in the block's slots.
        drafts: K, slots a block.
        candidates: C, candidates kept a slot (`selector_top_k`; 1 proposes the argmax).
        probabilistic: at T > 0 draw from q (True) or propose its mode with a one-hot q (False).
    """

    def __init__(self, drafter: Drafter, mask_token_id: int, drafts: int, candidates: int, probabilistic: bool) -> None:
        self.drafter = drafter
        self.mask_token_id = mask_token_id
        self.drafts = drafts
        self.candidates = candidates
        self.probabilistic = probabilistic
        self.block: DraftBlock | None = None

    def verify(self, inputs: VerifyInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of this step against the block of the last one; see `verification.verify`."""
        return verify(inputs, self.block)

    def context_kv(self, taps: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """taps [T, F*Ht] of this step's rows, positions [T] -> K, V of every draft layer, each [L, T, nkv, hd]."""
        return self.drafter.context_kv(taps, positions)

    def block_inputs(self, anchors: Anchors) -> tuple[torch.Tensor, torch.Tensor]:
        """[anchor, MASK x K] of every request -> (input_ids, positions), each [B * (1 + K)] int64, request-major."""
        rows = anchors.token_ids.shape[0], 1 + self.drafts
        input_ids = anchors.token_ids.new_full(rows, self.mask_token_id)
        input_ids[:, 0] = anchors.token_ids
        steps = torch.arange(rows[1], device=input_ids.device)
        return input_ids.flatten(), (anchors.positions.unsqueeze(1) + steps).flatten()

    def draft(self, anchors: Anchors, forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> DraftBlock:
        """One batched forward and the path through its candidates: the block of these requests, kept for `verify`.

        forward: (input_ids, positions) [B * (1 + K)] -> final-normed hidden [B * (1 + K), H], in the engine's
        attention context. Drafts at or past `anchors.limit` are -1.
        """
        count = anchors.token_ids.shape[0]
        hidden = forward(*self.block_inputs(anchors))
        slots = hidden.view(count, 1 + self.drafts, -1)[:, 1:]
        ids, logits = self.drafter.candidates(slots.reshape(count * self.drafts, -1), self.candidates)
        temperature = anchors.temperature if self.probabilistic else torch.zeros_like(anchors.temperature)
        token_ids, scores = self.drafter.select(
            slots,
            ids.view(count, self.drafts, -1),
            logits.view(count, self.drafts, -1),
            anchors.token_ids,
            temperature,
            anchors.seeds,
            anchors.positions,
        )
        positions = anchors.positions.unsqueeze(1) + torch.arange(1, 1 + self.drafts, device=token_ids.device)
        token_ids = token_ids.masked_fill(positions >= anchors.limit, -1)
        sparse = (ids.view(count, self.drafts, -1), scores) if self.probabilistic else (None, None)
        drafted = DraftBlock(list(anchors.request_ids), token_ids, *sparse)
        self.block = drafted.with_rows(self.block)
        return drafted

    def forget(self, scheduled: Collection[str], alive: Container[str]) -> None:
        """Drop the blocks that this step has verified or that nobody will verify.

        Call it between `verify` and `draft`. A request that the scheduler left out of this step keeps its block: its
        drafts come back in a later one, and they were drawn from that q.
        """
        if self.block is not None:
            self.block = self.block.without(scheduled, alive)
