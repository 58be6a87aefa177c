# SPDX-License-Identifier: Apache-2.0
"""Is a sample of token sequences from the target's own distribution? Exact probabilities and a chi-square test."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.reference.target import ReferenceTarget

LEAST_EXPECTED = 5.0


Adjust = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [N, V] of the next token and the output so far [N, t] -> logits that are sampled from."""


def exact_distribution(
    target: Path, prompt: Sequence[int], length: int, adjust: Adjust = lambda logits, output: logits
) -> torch.Tensor:
    """P of each continuation of `length` tokens, [V] * length fp64: the softmaxes of the target multiplied out."""
    model = ReferenceTarget(target).model
    joint = torch.ones(1, dtype=torch.float64)
    prefixes = torch.tensor([list(prompt)])
    vocabulary = model.config.vocab_size
    with torch.no_grad():
        for _ in range(length):
            parts = [model(part, use_cache=False).logits[:, -1] for part in prefixes.split(256)]
            following = adjust(torch.cat(parts), prefixes[:, len(prompt) :]).softmax(-1)
            joint = (joint[:, None] * following).flatten()
            tokens = torch.arange(vocabulary).repeat(len(prefixes))
            prefixes = torch.cat([prefixes.repeat_interleave(vocabulary, 0), tokens[:, None]], dim=1)
    return joint.reshape([vocabulary] * length)


def sampling_rule(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: dict[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    prompt: Sequence[int] = (),
) -> Adjust:
    """What these parameters of a request make of its logits, in the order in which vLLM applies them."""

    def adjust(logits: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        if allowed_token_ids is not None:
            allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
            allowed[list(allowed_token_ids)] = True
            logits = logits.masked_fill(~allowed, float("-inf"))
        if output.shape[1] < min_tokens:
            logits[:, list(stop_token_ids)] = float("-inf")
        for token, bias in (logit_bias or {}).items():
            logits[:, token] += bias
        counts = torch.zeros_like(logits).scatter_add_(1, output, torch.ones_like(output, dtype=logits.dtype))
        seen = counts > 0
        seen[:, list(prompt)] = True
        repeated = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, repeated, logits)
        logits = logits - frequency_penalty * counts - presence_penalty * (counts > 0)
        logits = logits / temperature
        if min_p:
            chances = logits.softmax(-1)
            least_chance = min_p * chances.max(dim=-1, keepdim=True).values
            logits = logits.masked_fill(chances < least_chance, float("-inf"))
        if top_k:
            least = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if top_p < 1:
            ordered, order = logits.softmax(-1).sort(descending=True)
            outside = ordered.cumsum(-1) - ordered >= top_p
            logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), float("-inf"))
        return logits

    return adjust


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic of counts against probabilities (same shape), and its p-value.

    Cells that expect fewer than five counts are one cell together.
    """
    counts, probabilities = counts.flatten().double(), probabilities.flatten().double()
    expected = probabilities * counts.sum()
    large = expected >= LEAST_EXPECTED
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] < 1e-9:
        assert observed[-1] == 0, "a token came out that the target gives no probability"
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected).square() / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(statistic), float(torch.special.gammaincc(freedom, statistic / 2))


def compare(samples: torch.Tensor, joint: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Chi-square of samples [N, 3] against the joint [V, V, V]: the first token, and both pairs of neighbours."""
    vocabulary = len(joint)
    first, second, third = samples.T
    return {
        "first": chi_square(torch.bincount(first, minlength=vocabulary), joint.sum((1, 2))),
        "first and second": chi_square(_pairs(first, second, vocabulary), joint.sum(2)),
        "second and third": chi_square(_pairs(second, third, vocabulary), joint.sum(0)),
    }


def _pairs(left: torch.Tensor, right: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.bincount(left * vocabulary + right, minlength=vocabulary**2).view(vocabulary, vocabulary)
