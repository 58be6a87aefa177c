# SPDX-License-Identifier: Apache-2.0
"""How many drafts a request gets, and the reason where it gets none."""

from vllm_dflash.spec_decode import DraftPlan


def test_the_smallest_cap_counts_whatever_the_order() -> None:
    plan = DraftPlan(4, 7)
    plan.cap(0, 3, "request")
    plan.cap(0, 5, "unprofitable")
    plan.cap(1, 5, "unprofitable")
    plan.cap(1, 3, "request")
    plan.cap(2, 9, "request")
    plan.cap(3, -2, "range")
    assert plan.lengths == [3, 3, 7, 0]
    assert plan.rows == [0, 1, 2]


def test_rows_without_drafts_are_counted_once_by_their_first_reason() -> None:
    plan = DraftPlan(4, 7)
    plan.cap(0, 0, "prompt")
    plan.cap(1, 2, "request")
    plan.skip_all("unprofitable")
    plan.skip_all("fault")
    plan.cap(0, 0, "request")
    plan.cap(2, 0, "request")
    assert plan.rows == []
    assert plan.skipped == {"prompt": 1, "unprofitable": 3}
