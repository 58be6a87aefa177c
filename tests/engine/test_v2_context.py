# SPDX-License-Identifier: Apache-2.0
"""What a V2 draft step attends to where context is missing: by its block tables and lengths alone."""

import torch

from vllm_dflash.engine.v2.context import leave_out


def test_blocks_before_a_start_leave_the_tables() -> None:
    """Groups of 4 and 8 tokens a block: both leave out whole blocks of 8, since one length serves them."""
    small = torch.arange(1, 13, dtype=torch.int32).repeat(3, 1)
    large = torch.arange(21, 27, dtype=torch.int32).repeat(3, 1)
    # 20 tokens of context and a block of 4 rows; the third's 20 end before its start.
    seq_lens = torch.full((3,), 24, dtype=torch.int32)
    anchors = torch.full((3,), 20)
    without, positions = leave_out([0, 9, 24], [4, 8], [small, large], seq_lens, anchors, 4)
    assert positions == [0, 16, 24] and without.tolist() == [False, False, True]
    assert seq_lens.tolist() == [24, 8, 4]
    assert small[:2].tolist() == [list(range(1, 13)), [5, 6, 7, 8, 9, 10, 11, 12, 12, 12, 12, 12]]
    assert large[:2].tolist() == [list(range(21, 27)), [23, 24, 25, 26, 26, 26]]
