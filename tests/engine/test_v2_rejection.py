# SPDX-License-Identifier: Apache-2.0
"""V2's verification where a grammar has cut drafts off, without an engine."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from tests.spec_decode.test_row_verification import drafted, rows_of
from tests.spec_decode.test_worker import K, V
from vllm_dflash.engine.v2.rejection import _without_invalid
from vllm_dflash.spec_decode import DraftSlots, verify_rows

COUNT = 40_000


@pytest.mark.parametrize("exact", [True, False])
def test_a_grammar_that_cuts_drafts_does_not_bias_the_output(exact: bool) -> None:
    """It forbids a token at slot 1: where that was drawn, the engine marks all drafts as cut, and masks the row.

    With `exact` False the cut draft counts as "no draft", the row gives a token from p, and the check must notice.
    """
    _, a, block, _, _ = drafted(COUNT, 1.0)
    slots = torch.arange(COUNT)
    q = DraftSlots(COUNT, K, block.candidate_ids.shape[2], "cpu")
    q.write(slots, block.token_ids, block.candidate_ids, block.candidate_logits)
    forbidden = int(block.token_ids[:, 0].mode().values)
    target = torch.randn(1 + K, V, generator=torch.Generator().manual_seed(1)) * 1.5
    target[0, forbidden] = float("-inf")
    rows = rows_of([K] * COUNT, a, block.token_ids, target.repeat(COUNT, 1), slots)
    cut = (block.token_ids[:, 0] == forbidden).unsqueeze(1).expand(COUNT, 1 + K).clone()
    cut[:, 0] = False
    valid = rows.token_ids.masked_fill(cut.flatten(), -1)
    judged = _without_invalid(rows.logits, rows.token_ids, valid) if exact else valid
    output, _ = verify_rows(type(rows)(**{**vars(rows), "token_ids": judged}), q, K)
    seen = Counter(output[:, 0].tolist())
    expected = torch.softmax(target[0].double(), 0) * COUNT
    possible = [token for token in range(V) if token != forbidden]
    assert seen.get(forbidden, 0) == 0
    pvalue = chisquare([seen.get(t, 0) for t in possible], expected[possible].numpy()).pvalue
    assert pvalue > 1e-3 if exact else pvalue < 1e-6


def test_a_cut_draft_that_its_row_allows_is_no_draft() -> None:
    """Behind it the rows know no grammar, so it must not be accepted."""
    drafts = torch.tensor([5, 7, 8])
    valid = torch.tensor([5, -1, -1])
    logits = torch.zeros(3, V)
    assert _without_invalid(logits, drafts, valid).tolist() == [5, -1, -1]
    logits[0, 7] = float("-inf")
    assert _without_invalid(logits, drafts, valid).tolist() == [5, 7, -1]
