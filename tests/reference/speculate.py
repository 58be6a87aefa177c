# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding with the reference target and drafter, one request, no caches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.reference.dflash import ContextKV, Draft, ReferenceDrafter
from tests.reference.target import ReferenceTarget


@dataclass
class Step:
    """One draft and its verification. The anchor stands at `anchor_position`."""

    anchor_position: int
    drafts: list[int]
    accepted: int


@dataclass
class Trace:
    """Output tokens (the prompt not among them) and the steps that made them."""

    token_ids: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def context_of(target: ReferenceTarget, drafter: ReferenceDrafter, token_ids: Sequence[int]) -> ContextKV:
    """The draft KV of a whole sequence, computed in one piece."""
    _, taps = target.run(token_ids, drafter.config.target_layer_ids)
    return drafter.context_kv(drafter.context_features(taps), torch.arange(len(token_ids)))


def drafts_at(
    context: ContextKV,
    drafter: ReferenceDrafter,
    token_ids: Sequence[int],
    anchor_position: int,
    num_drafts: int | None = None,
    start: int = 0,
) -> Draft:
    """What the drafter proposes after `token_ids[anchor_position]`, all tokens from `start` to it being context.

    `context` may reach further than the anchor (a later token's tap depends on no earlier row).
    """
    before = [(key[start:anchor_position], value[start:anchor_position]) for key, value in context]
    return drafter.draft(before, token_ids[anchor_position], num_drafts, start=start)


def speculate(
    target: ReferenceTarget,
    drafter: ReferenceDrafter,
    prompt_ids: Sequence[int],
    max_tokens: int,
    num_drafts: int | None = None,
) -> Trace:
    """Greedy speculative decoding until `max_tokens` tokens stand; the surplus of the last step is cut.

    Each step drafts after the last token, verifies the draft in one target forward, keeps the longest prefix
    that equals the target's own argmax, and adds the target's next token.
    """
    trace = Trace()
    token_ids = list(prompt_ids)
    logits, _ = target.run(token_ids)
    token_ids.append(int(logits[-1].argmax()))
    while len(token_ids) - len(prompt_ids) < max_tokens:
        anchor_position = len(token_ids) - 1
        context = context_of(target, drafter, token_ids[:-1])
        drafts = drafts_at(context, drafter, token_ids, anchor_position, num_drafts).token_ids
        logits, _ = target.run(token_ids + drafts)
        judged = logits[anchor_position:].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == judged[accepted]:
            accepted += 1
        token_ids += [*drafts[:accepted], judged[accepted]]
        trace.steps.append(Step(anchor_position, drafts, accepted))
    trace.token_ids = token_ids[len(prompt_ids) :][:max_tokens]
    return trace
