# SPDX-License-Identifier: Apache-2.0
"""The sparse q of every request's last drafts, in buffers that stay where they are."""

import torch

NO_CANDIDATE = -1


class DraftSlots:
    """Candidates and their scores by request slot: what a captured draft step writes and verification reads.

    A `DraftBlock` is keyed by request on the host; this is its form for an engine that keeps requests in numbered
    slots on the device and captures the draft step. Nothing is allocated after construction.

    Args:
        slots: most requests at once. drafts: K. candidates: C.
    """

    def __init__(self, slots: int, drafts: int, candidates: int, device: torch.device | str) -> None:
        # One row more than requests: rows of padding write there, and nobody reads it.
        shape = (slots + 1, drafts, candidates)
        self.candidate_ids = torch.full(shape, NO_CANDIDATE, dtype=torch.int32, device=device)
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.candidate_ids.nbytes + self.scores.nbytes

    def write(
        self, slots: torch.Tensor, token_ids: torch.Tensor, candidate_ids: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Keep the q of B requests' drafts.

        slots [B] int64, -1 a row of padding; token_ids [B, K] (-1: no draft, its q is one-hot); candidate_ids and
        scores [B, K, C], log q up to a constant, already over T where T > 0.
        """
        at = torch.where(slots < 0, self.scores.shape[0] - 1, slots)
        known = torch.where(token_ids.unsqueeze(-1) < 0, NO_CANDIDATE, candidate_ids)
        self.candidate_ids.index_copy_(0, at, known.to(torch.int32))
        self.scores.index_copy_(0, at, scores)

    def clear(self, slots: torch.Tensor) -> None:
        """The drafts of these requests are judged as certain: slots [B] int64."""
        self.candidate_ids.index_fill_(0, slots, NO_CANDIDATE)

    def read(self, slots: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The q of drafts [N]: drafts `columns` (0 to K-1) of requests in `slots`, both [N] int64.

        -> candidate_ids [N, C] int64, -1 where absent, and scores [N, C] fp32.
        """
        return self.candidate_ids[slots, columns].to(torch.int64), self.scores[slots, columns]

    def dense(self, slots: torch.Tensor, temperature: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits [B, K, V] fp32 of q before the temperature [B], for a verifier that knows no other form."""
        ids, scores = self.candidate_ids[slots].to(torch.int64), self.scores[slots]
        # A missing draft stands in its row as token 0, and is certain.
        missing = (ids < 0).all(dim=-1)
        ids[..., 0] = torch.where(missing, 0, ids[..., 0])
        scores[..., 0] = torch.where(missing, 0.0, scores[..., 0])
        scores = scores * torch.where(temperature > 0, temperature, 1.0)[:, None, None]
        # Absent candidates land in one more column, which is cut off.
        wide = scores.new_full((*ids.shape[:2], vocab_size + 1), -torch.inf)
        return wide.scatter_(2, torch.where(ids < 0, vocab_size, ids), scores)[..., :vocab_size]
