# SPDX-License-Identifier: Apache-2.0
"""Compares the drafts that an engine recorded with those of the plain torch reference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.reference.dflash import read_drafter
from tests.reference.speculate import context_of, drafts_at
from tests.reference.target import ReferenceTarget
from tests.support.checkpoints import Pair
from tests.support.engine_process import Output, Trace


def check_drafts(
    pair: Pair,
    outputs: Sequence[Output],
    traces: Mapping[str, Trace],
    num_drafts: int,
    limit: int | None = None,
    starts: Mapping[str, int] | None = None,
    window: int | None = None,
) -> int:
    """Every recorded draft equals the reference's, and every token is the target's argmax; returns the drafts' number.

    `limit`: the first position that a draft may not take; near it a block is as long as fits below.
    `starts`: the first position of each request that is context. `window`: of the layers that have full attention.
    """
    target = ReferenceTarget(pair.target)
    drafter = read_drafter(pair.drafter, target)
    if window is not None:
        drafter.config = replace(drafter.config, windows=tuple(w or window for w in drafter.config.windows))
    compared = 0
    for output in outputs:
        token_ids = output.prompt_token_ids + output.token_ids
        context = context_of(target, drafter, token_ids)
        start = 0 if starts is None else starts[output.request_id]
        for step in traces[output.request_id].steps:
            at = step.anchor_position
            if at >= len(token_ids):
                continue
            fit = num_drafts if limit is None else min(num_drafts, limit - 1 - at)
            expected = drafts_at(context, drafter, token_ids, at, fit, start).token_ids if fit > 0 else []
            assert step.drafts == expected, f"request {output.request_id}, anchor at {at}"
            compared += 1
        judged = target.run(token_ids)[0].argmax(-1).tolist()
        assert output.token_ids == judged[len(output.prompt_token_ids) - 1 : -1], "not the target's greedy tokens"
    return compared
