# SPDX-License-Identifier: Apache-2.0
"""SpecDecodeWorker: verify, inject, draft and select for the scheduler's whole batch at once."""

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_dflash.spec_decode.draft_block import DraftBlock
from vllm_dflash.spec_decode.outcome import Observer, Readback, StepOutcome, Tally, TimingObserver
from vllm_dflash.spec_decode.timing import StageClock
from vllm_dflash.spec_decode.verification import VerifyInputs, judge


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
    lengths: B numbers of drafts, decided before they are drawn; None: K each.
    """

    request_ids: Sequence[str]
    token_ids: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    limit: int
    lengths: Sequence[int] | None = None

    def select(self, rows: Sequence[int], at: torch.Tensor) -> "Anchors":
        """The anchors of some rows; at [b] int64 are the same on the device."""
        return Anchors(
            [self.request_ids[row] for row in rows],
            self.token_ids[at],
            self.positions[at],
            self.temperature[at],
            self.seeds[at],
            self.limit,
            None if self.lengths is None else [self.lengths[row] for row in rows],
        )


# The ends of steps, its own counted, at which what became of a step's drafts is heard. The device has done two more
# steps' work by then at least, with asynchronous scheduling one.
HEARD_AFTER = 3

# (request ids, lengths as planned, [B][K] modes of the slots' q) -> lengths to verify.
Cut = Callable[[Sequence[str], Sequence[int], list[list[float]]], list[int]]


class SpecDecodeWorker:
    """One draft and verify cycle over a batch. An adapter gives it the engine's tensors and runs its forward.

    Args:
        drafter: the draft network.
        mask_token_id: what stands in the block's slots.
        drafts: K, slots a block.
        candidates: C, candidates kept a slot (`selector_top_k`; 1 proposes the argmax).
        probabilistic: at T > 0 draw from q (True) or propose its mode with a one-hot q (False).
        device: where the stages are timed.

    `observers` are told the outcome of each step, after `verify` or, for requests without drafts, in `end_step`.
    `cut`, where set, shortens sampled blocks by their q; it reads them on the host, once a draft.
    `on_non_finite` is told after each draft which of how many requests came out as NaN or infinite; a request whose
    context was left behind since it was drafted for is none of them.
    `timing_observers` are told, in `end_step`, the stages that have completed. `tally` counts the rest.
    """

    def __init__(
        self,
        drafter: Drafter,
        mask_token_id: int,
        drafts: int,
        candidates: int,
        probabilistic: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.drafter = drafter
        self.mask_token_id = mask_token_id
        self.drafts = drafts
        self.candidates = candidates
        self.probabilistic = probabilistic
        self.block: DraftBlock | None = None
        self.clock = StageClock(device)
        self.tally = Tally()
        self.observers: list[Observer] = []
        self.timing_observers: list[TimingObserver] = []
        self.cut: Cut | None = None
        self.on_non_finite: Callable[[list[str], int], None] | None = None
        self._readback = Readback()
        self._verified: set[str] = set()
        self._left_behind: dict[str, int] = {}

    def hear_alike(self) -> None:
        """For ranks that run one model together: each hears what became of a step's drafts at the end of the same later
        step, however late its device is, so that all of them do the same about it. By then it needn't wait."""
        self._readback.after = HEARD_AFTER

    def leave_behind(self, request_ids: Sequence[str]) -> None:
        """These requests' context begins anew: what was drafted so far tells nothing about it any more."""
        self._left_behind.update(dict.fromkeys(request_ids, self.clock.step))

    def verify(self, inputs: VerifyInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of this step against the block of the last one; see `verification.verify`."""
        with self.clock.stage("verify", rows=inputs.draft_ids.shape[0] + len(inputs.counts)):
            verdict = judge(inputs, self.block)
        self.observe(inputs.request_ids, inputs.counts, verdict.drafted, (verdict.output_ids >= 0).sum(dim=1))
        return verdict.output_ids, verdict.accepted

    def observe(
        self, request_ids: Sequence[str], counts: Sequence[int], drafted: torch.Tensor | None, emitted: torch.Tensor
    ) -> None:
        """Tells the observers about the requests that had rows to verify, once the numbers are on the host.

        counts: B rows to verify. drafted: [B] how many of them held a draft, None: all. emitted: [B] tokens they gave.
        """
        rows = [row for row, count in enumerate(counts) if count]
        ids = [request_ids[row] for row in rows]
        step = self.clock.step
        self._verified = set(ids)
        if not ids or not self.observers:
            return

        def tell(numbers: list[list[int]]) -> None:
            real = counts if drafted is None else numbers[1]
            own = [min(real[row], counts[row]) for row in rows]
            # A row without a finite logit yields no token at all.
            accepted = [min(max(numbers[0][row] - 1, 0), most) for row, most in zip(rows, own, strict=True)]
            self._tell(StepOutcome(ids, own, accepted, self._skipped(), step))

        self._readback.read(torch.stack([emitted] if drafted is None else [emitted, drafted]), tell)

    def end_step(self, decoding: Sequence[str]) -> None:
        """Call it after each step, drafted or not. decoding: ids of the requests past their prompt in this step."""
        self._readback.poll()
        plain = decoding
        if self._verified:
            plain = [request_id for request_id in decoding if request_id not in self._verified]
            self._verified = set()
        if plain or self.tally.skipped:
            none = [0] * len(plain)
            self._tell(StepOutcome(plain, none, none, self._skipped(), self.clock.step))
        timings = self.clock.take()
        for observer in self.timing_observers:
            observer(timings)

    def _tell(self, outcome: StepOutcome) -> None:
        for observer in self.observers:
            observer(outcome)

    def _skipped(self) -> dict[str, int]:
        skipped = dict(self.tally.skipped)
        self.tally.skipped.clear()
        return skipped

    def context_kv(self, taps: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """taps [T, F*Ht] of this step's rows, positions [T] -> K, V of every draft layer, each [L, T, nkv, hd].

        The caller times the stage "inject": it writes them.
        """
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
        attention context. Drafts at or past `anchors.limit`, and past a request's length, are -1.
        """
        count = anchors.token_ids.shape[0]
        with self.clock.stage("draft", rows=count * (1 + self.drafts)):
            hidden = forward(*self.block_inputs(anchors))
        with self.clock.stage("select", rows=count * self.drafts):
            token_ids, ids, scores = self.path(hidden.view(count, 1 + self.drafts, -1), anchors)
        out_of_range = anchors.positions + 1 >= anchors.limit
        planned = anchors.lengths or [self.drafts] * count
        self.drafted(anchors.request_ids, planned, token_ids[:, 0] < 0, out_of_range)
        kept = anchors.lengths
        if self.cut is not None and ids.shape[-1] > 1:
            modes = torch.softmax(scores, dim=-1).amax(dim=-1).nan_to_num(0.0)
            kept = self.cut(anchors.request_ids, planned, modes.tolist())
        if kept is not None and min(kept) < self.drafts:
            lengths = torch.tensor(kept).to(token_ids.device, non_blocking=True)
            slots_after = torch.arange(self.drafts, device=token_ids.device) >= lengths.unsqueeze(1)
            token_ids = token_ids.masked_fill(slots_after, -1)
        drafted = DraftBlock(
            list(anchors.request_ids),
            token_ids,
            ids if self.probabilistic else None,
            scores if self.probabilistic else None,
            kept,
        )
        self.block = drafted.with_rows(self.block)
        return drafted

    def path(self, hidden: torch.Tensor, anchors: Anchors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The path through the candidates of the blocks' final-normed hidden states [B, 1 + K, H].

        -> token_ids [B, K] int64, -1 at or past `anchors.limit`, and for all of a block that holds NaN or +inf;
        candidate ids [B, K, C] int64; their scores [B, K, C] fp32, over T where drafts are sampled. Reads tensors only,
        so that a CUDA graph can hold it.
        """
        count, slots = hidden.shape[0], hidden[:, 1:]
        ids, logits = self.drafter.candidates(slots.reshape(count * self.drafts, -1), self.candidates)
        ids = ids.view(count, self.drafts, -1)
        temperature = anchors.temperature if self.probabilistic else torch.zeros_like(anchors.temperature)
        token_ids, scores = self.drafter.select(
            slots, ids, logits.view(ids.shape), anchors.token_ids, temperature, anchors.seeds, anchors.positions
        )
        positions = anchors.positions.unsqueeze(1) + torch.arange(1, 1 + self.drafts, device=token_ids.device)
        finite = (logits.view(count, -1) < torch.inf).all(dim=1, keepdim=True)
        return token_ids.masked_fill((positions >= anchors.limit) | ~finite, -1), ids, scores

    def drafted(
        self,
        request_ids: Sequence[str],
        lengths: Sequence[int],
        without: torch.Tensor,
        out_of_range: torch.Tensor,
        no_context: torch.Tensor | None = None,
    ) -> None:
        """Call it after each draft step; `draft` does. lengths: drafts planned for each of B requests.

        without: [B] bool, requests that got none; out_of_range, no_context: [B] bool, those that could get none.
        Of the others, those without came out as NaN or infinite.
        """
        drafted_for = list(zip(request_ids, lengths, strict=True))
        reasons = [without, out_of_range] if no_context is None else [without, out_of_range, no_context]
        step = self.clock.step

        def tell(flags: list[list[bool]]) -> None:
            bad, drafted = [], 0
            if self._left_behind:
                self._left_behind = {name: at for name, at in self._left_behind.items() if at >= step}
            for (request_id, length), (none, *known) in zip(drafted_for, zip(*flags, strict=True), strict=True):
                if not length:
                    continue
                if any(known):
                    self.tally.skip("range" if known[0] else "no_context")
                elif none and request_id in self._left_behind:
                    self.tally.skip("fault")
                else:
                    drafted += 1
                    if none:
                        bad.append(request_id)
            self.tally.skip("fault", len(bad))
            if self.on_non_finite is not None:
                self.on_non_finite(bad, drafted)

        if self.observers or self.on_non_finite is not None:
            self._readback.read(torch.stack(reasons), tell)

    def forget(self, scheduled: Collection[str], alive: Container[str]) -> None:
        """Drop the blocks that this step has verified or that nobody will verify.

        Call it between `verify` and `draft`. A request that the scheduler left out of this step keeps its block: its
        drafts come back in a later one, and they were drawn from that q.
        """
        if self.block is not None:
            self.block = self.block.without(scheduled, alive)
