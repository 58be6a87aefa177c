# SPDX-License-Identifier: Apache-2.0
"""The verified tokens follow the target's distribution: chi-square over 200,000 requests, drafts by the
selector's walk.

The same measurement must catch planted errors, or it would prove nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.ops import cases
from tests.ops.implementations import NAMES, REFERENCE, implementation
from vllm_dflash.ops import noise
from vllm_dflash.ops.reference import rejection

REQUESTS, SLOTS, VOCABULARY, CANDIDATES, RANK = 200_000, 2, 12, 5, 4
CERTAIN = 1e-7  # a fair chi-square is below this once in ten million


def scenario(name: str) -> cases.Arguments:
    """logits [SLOTS + 1, V] that judge all requests alike, and what the selector draws their drafts from."""
    rng = cases.generator(len(name))
    case = {
        "logits": cases.normal(rng, SLOTS + 1, VOCABULARY) * 1.5,
        "ids": torch.stack([torch.randperm(VOCABULARY, generator=rng)[:CANDIDATES] for _ in range(SLOTS)]),
        "drafted": cases.normal(rng, SLOTS, CANDIDATES),
        "codebooks": cases.normal(rng, 2, VOCABULARY, RANK),
        "projected": cases.normal(rng, SLOTS, RANK),
        "temperature": 1.0,
        "one_hot": name == "one-hot q",
    }
    if name == "low temperature":
        case["temperature"] = 0.4
    elif name == "rows with -inf":
        case["logits"][:, ::2] = -torch.inf
    elif name == "ties":
        case["logits"] = case["logits"].sign()
        case["drafted"] = torch.zeros(SLOTS, CANDIDATES)
    elif name == "equal p and q":
        case["ids"] = torch.arange(VOCABULARY).expand(SLOTS, -1).contiguous()
        case["drafted"] = case["logits"][:SLOTS].clone()
        case["codebooks"] = torch.zeros(2, VOCABULARY, RANK)
    elif name == "q far from p":
        case["drafted"] = -case["logits"][:SLOTS].gather(1, case["ids"]) * 2
    return case


SCENARIOS = [
    "near", "low temperature", "rows with -inf", "ties", "equal p and q", "q far from p", "one-hot q",
]  # fmt: skip


def draw(case: cases.Arguments, run: SimpleNamespace, scores_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts SLOTS tokens for every request and verifies them; one step of REQUESTS requests."""
    key = {"seeds": torch.arange(REQUESTS) * 7919 - 12345, "anchor_positions": torch.arange(REQUESTS) % 50}
    everywhere = lambda x: x.expand(REQUESTS, *x.shape).contiguous()  # noqa: E731
    temperature = torch.full((REQUESTS,), case["temperature"])
    ids = everywhere(case["ids"])
    tokens, scores = run.select_path(
        ids,
        everywhere(case["drafted"]),
        everywhere(case["projected"]),
        *case["codebooks"],
        torch.arange(REQUESTS) % VOCABULARY,
        temperature * (not case["one_hot"]),
        **key,
    )
    width = ids.shape[-1]
    candidate_ids, candidate_scores = ids.view(-1, width), scores.view(-1, width) * scores_scale
    if case["one_hot"]:
        candidate_ids, candidate_scores = tokens.view(-1, 1), torch.zeros(REQUESTS * SLOTS, 1)
    return run.reject_sparse(
        case["logits"],
        torch.arange(SLOTS).repeat(REQUESTS),
        torch.full((REQUESTS,), SLOTS),
        tokens.view(-1),
        torch.arange(REQUESTS + 1, dtype=torch.int32) * SLOTS,
        candidate_ids,
        candidate_scores,
        temperature,
        max_drafts=SLOTS,
        **key,
    )


def p_value(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """Of the chi-square of tokens against p; 0 where a token of probability 0 was drawn."""
    counts = torch.bincount(tokens.long(), minlength=VOCABULARY).double()
    if counts[p == 0].any():
        return 0.0
    expected = p[p > 0] * tokens.numel()
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float((p > 0).sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, chi_square / 2))


def worst(case: cases.Arguments, output: torch.Tensor, accepted: torch.Tensor) -> float:
    """The least p-value of the slots: the token after i accepted drafts follows p_i, whatever was
    accepted."""
    p = (case["logits"].double() / case["temperature"]).softmax(-1)
    values = [p_value(output[:, 0], p[0])]
    for slot in range(1, SLOTS + 1):
        reached = accepted >= slot
        if reached.sum() > 1000:
            values.append(p_value(output[reached, slot], p[slot]))
    assert len(values) > 1, "too few acceptances to say anything"
    return min(values)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "reference" else name for name in NAMES]
)
@pytest.mark.parametrize("kind", SCENARIOS)
def test_tokens_follow_the_target(kind: str, name: str) -> None:
    case = scenario(kind)
    assert worst(case, *draw(case, implementation(name))) > CERTAIN


def test_equal_p_and_q_accept_everything() -> None:
    case = scenario("equal p and q")
    _, accepted = draw(case, implementation(NAMES[-1]))
    assert (accepted == SLOTS).float().mean() > 0.9999


def test_a_scaled_q_is_caught() -> None:
    case = scenario("near")
    assert worst(case, *draw(case, REFERENCE, scores_scale=0.9)) < CERTAIN


def test_an_unsubtracted_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    case = scenario("near")
    assert worst(case, *draw(case, REFERENCE)) < CERTAIN


def test_noise_shared_between_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    fair = noise.uniform
    monkeypatch.setattr(noise, "uniform", lambda seeds, positions, slot, stream: fair(seeds, positions, 1, stream))
    case = scenario("near")
    assert worst(case, *draw(case, REFERENCE)) < CERTAIN


def test_noise_shared_between_draft_and_recovery_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "RECOVER", noise.DRAFT)
    case = scenario("near")
    assert worst(case, *draw(case, REFERENCE)) < CERTAIN
