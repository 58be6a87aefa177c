# SPDX-License-Identifier: Apache-2.0
"""Lossless verification with a sparse q, one request after the other, in plain torch with noise of its own.

Written from the rule (DFlash 2 announcement; Leviathan et al. 2023), not from the product. It takes the arguments of
the product's operation, so that it can stand in for it inside an engine; with `q_scale` away from 1 its acceptance
test is wrong on purpose, and a distribution test must notice.
"""

import torch


def proposal(vocab_size: int, draft: int, candidate_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """q [V] of one slot: softmax of the finite scores over the present candidates; one-hot where the draft is none."""
    present = (candidate_ids >= 0) & scores.isfinite()
    q = torch.zeros(vocab_size, dtype=torch.float64)
    if draft in candidate_ids[present].tolist():
        q[candidate_ids[present]] = scores[present].double().softmax(-1)
    elif draft >= 0:
        q[draft] = 1.0
    return q


def reject(
    logits: torch.Tensor,
    draft_rows: torch.Tensor,
    bonus_rows: torch.Tensor,
    draft_ids: torch.Tensor,
    cu_drafts: torch.Tensor,
    candidate_ids: torch.Tensor,
    candidate_scores: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
    max_drafts: int,
    q_scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output_ids [B, max_drafts + 1] int32 padded with -1, accepted [B] int32). Seeds and positions are not used."""
    requests = len(temperature)
    output_ids = torch.full((requests, max_drafts + 1), -1, dtype=torch.int32)
    accepted = torch.zeros(requests, dtype=torch.int32)
    for request in range(requests):
        hot = float(temperature[request])

        def row(index: int, hot: float = hot) -> torch.Tensor:
            return (logits[index].double() / (hot or 1.0)).softmax(-1)

        def draw(weights: torch.Tensor, hot: float = hot) -> int:
            return int(torch.multinomial(weights, 1, generator=generator) if hot else weights.argmax())

        first, end = int(cu_drafts[request]), int(cu_drafts[request + 1])
        for place, index in enumerate(range(first, end)):
            p, draft = row(int(draft_rows[index])), int(draft_ids[index])
            if hot == 0:
                keeps, rest = draft == int(p.argmax()), p
            else:
                q = proposal(len(p), draft, candidate_ids[index], candidate_scores[index])
                u = torch.rand((), dtype=torch.float64, generator=generator)
                keeps = draft >= 0 and bool(u * q_scale * q[draft] < p[draft])
                rest = (p - q).clamp(min=0)
                rest = p if rest.sum() == 0 else rest
            if not keeps:
                output_ids[request, place] = draw(rest)
                break
            output_ids[request, place] = draft
            accepted[request] += 1
        else:
            if int(bonus_rows[request]) >= 0:
                output_ids[request, end - first] = draw(row(int(bonus_rows[request])))
    return output_ids, accepted
