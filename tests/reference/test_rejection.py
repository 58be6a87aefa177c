# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tests.reference.rejection import proposal, reject
from tests.support.distribution import chi_square


def verify(p, q_scores, drafts, **options):
    """One slot and a bonus row for each draft, all with the same p and candidates."""
    count = len(drafts)
    return reject(
        logits=torch.stack([p.log(), p.log()]),
        draft_rows=torch.zeros(count, dtype=torch.int64),
        bonus_rows=torch.ones(count, dtype=torch.int64),
        draft_ids=torch.tensor(drafts),
        cu_drafts=torch.arange(count + 1, dtype=torch.int32),
        candidate_ids=torch.arange(len(q_scores)).expand(count, -1),
        candidate_scores=q_scores.expand(count, -1),
        temperature=torch.full((count,), options.pop("temperature", 1.0)),
        seeds=torch.zeros(count, dtype=torch.int64),
        anchor_positions=torch.zeros(count, dtype=torch.int64),
        max_drafts=1,
        **options,
    )


@pytest.mark.parametrize(("q_scale", "lossless"), [(1.0, True), (1.2, False)])
def test_output_follows_p_only_with_the_right_q(q_scale, lossless):
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    scores = torch.tensor([0.1, 0.5, 1.4])
    drafts = torch.multinomial(scores.softmax(-1), 6000, replacement=True, generator=generator).tolist()
    output_ids, _ = verify(p, scores, drafts, q_scale=q_scale, generator=generator)
    counts = torch.bincount(output_ids[:, 0].long(), minlength=5)
    statistic, chance = chi_square(counts, p)
    assert (chance > 1e-3) == lossless, f"chi-square {statistic:.1f}, p-value {chance:.2g}"


def test_greedy_keeps_the_mode_and_else_emits_it():
    p = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)
    output_ids, accepted = verify(p, torch.zeros(3), [1, 2, -1], temperature=0.0)
    assert output_ids.tolist() == [[1, 1], [1, -1], [1, -1]]
    assert accepted.tolist() == [1, 0, 0]


def test_a_draft_outside_its_candidates_is_certain():
    assert proposal(4, 3, torch.tensor([0, 1]), torch.zeros(2)).tolist() == [0, 0, 0, 1]
    assert proposal(4, 1, torch.tensor([-1, 1]), torch.zeros(2)).tolist() == [0, 1, 0, 0]
