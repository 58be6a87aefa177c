# SPDX-License-Identifier: Apache-2.0
"""The torch references against the formulas, written out as loops over single numbers."""

import math

import torch

from tests.ops import cases
from vllm_dflash.ops import noise
from vllm_dflash.ops.reference import context_kv, convolution, rejection, selector

F64 = torch.float64


def test_convolution_formula() -> None:
    case = cases.convolution(1, blocks=3, block=4, groups=2, size=3, taps=3, dtype=F64)
    got = convolution.grouped_convolution(**case)
    x, dynamic, base = case["x"], case["dynamic"], case["base"]
    for i in range(12):
        for c in range(6):
            want = sum(float((base[t, c] + dynamic[i, t, c // 3]) * x[i - t, c]) for t in range(3) if i % 4 - t >= 0)
            assert math.isclose(float(got[i, c]), want, rel_tol=1e-12, abs_tol=1e-12)


def test_path_formula() -> None:
    case = cases.path(2, batch=4, slots=3, candidates=5, rank=4, vocabulary=20, dtype=F64)
    case["temperature"] = torch.tensor([0.0, 0.5, 1.0, 2.0])
    tokens, scores = selector.select_path(**case)
    for b in range(4):
        last, temperature = int(case["anchors"][b]), float(case["temperature"][b])
        for j in range(3):
            ids = case["candidate_ids"][b, j].tolist()
            s = [
                float(case["candidate_logits"][b, j, c])
                + sum(
                    float(case["predecessor"][last, r] * case["projected"][b, j, r] * case["successor"][ids[c], r])
                    for r in range(4)
                )
                for c in range(5)
            ]
            s = [v / (temperature or 1.0) for v in s]
            assert torch.allclose(scores[b, j], torch.tensor(s, dtype=F64), rtol=1e-6)
            if temperature == 0:
                choice = s.index(max(s))
            else:
                p = [math.exp(v) for v in s]
                u = float(noise.uniform(case["seeds"][b], case["anchor_positions"][b], j + 1, noise.DRAFT))
                choice = next(c for c in range(5) if sum(p[: c + 1]) > u * sum(p))
            last = ids[choice]
            assert int(tokens[b, j]) == last


def test_rejection_formula() -> None:
    case = cases.rejection(3, counts=[3, 0, 1, 4, 2, 5], vocabulary=30, candidates=4, dtype=F64)
    case["temperature"][:2] = torch.tensor([0.8, 1.0])
    output, accepted = rejection.reject_sparse(**case)
    for b in range(6):
        want = rejection_by_hand(case, b)
        assert output[b].tolist() == want[0] + [-1] * (output.shape[1] - len(want[0]))
        assert int(accepted[b]) == want[1]


def probabilities(x: torch.Tensor, temperature: float) -> list[float]:
    if temperature == 0:
        return [float(i == int(x.argmax())) for i in range(len(x))]
    e = [math.exp(float(v) / temperature) for v in x]
    return [v / sum(e) for v in e]


def draw(weights: list[float], u: float) -> int:
    total = sum(weights)
    return next(i for i in range(len(weights)) if sum(weights[: i + 1]) > u * total)


def rejection_by_hand(case: cases.Arguments, b: int) -> tuple[list[int], int]:
    temperature = float(case["temperature"][b])
    start, end = int(case["cu_drafts"][b]), int(case["cu_drafts"][b + 1])

    def u(slot: int, stream: int) -> float:
        return float(noise.uniform(case["seeds"][b], case["anchor_positions"][b], slot, stream))

    tokens: list[int] = []
    for slot, n in enumerate(range(start, end), 1):
        p = probabilities(case["logits"][case["draft_rows"][n]], temperature)
        x = int(case["draft_ids"][n])
        q = [0.0] * len(p)
        if x >= 0:
            weights = [math.exp(float(s)) for s in case["candidate_scores"][n]]
            for c, w in zip(case["candidate_ids"][n].tolist(), weights, strict=True):
                q[c] = w / sum(weights)
            if q[x] == 0:
                q = [float(i == x) for i in range(len(p))]
            if u(slot, noise.ACCEPT) * q[x] < p[x]:
                tokens.append(x)
                continue
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        return [*tokens, draw(residual if sum(residual) > 0 else p, u(slot, noise.RECOVER))], len(tokens)
    if int(case["bonus_rows"][b]) >= 0:
        p = probabilities(case["logits"][case["bonus_rows"][b]], temperature)
        tokens.append(draw(p, u(end - start + 1, noise.BONUS)))
    return tokens, end - start


def test_context_formula() -> None:
    for is_neox in (True, False):
        case = cases.context(5, rows=3, layers=2, heads=2, size=8, dtype=F64, is_neox=is_neox, rotated=4)
        case["positions"][1] = 64  # outside the rotary cache
        k, v = context_kv.context_kv_rows(**case)
        assert (k[:, 1] == 0).all() and (v[:, 1] == 0).all()
        for t in (0, 2):
            cos, sin = case["cos_sin"][case["positions"][t]].double().chunk(2)
            for layer in range(2):
                x = case["kv"][t, layer, 0, 1]
                x = x / math.sqrt(float((x * x).sum()) / 8 + 1e-6) * case["k_norm"][layer]
                want = x.clone()
                for i in range(2):
                    a, b = (i, i + 2) if is_neox else (2 * i, 2 * i + 1)
                    want[a] = x[a] * cos[i] - x[b] * sin[i]
                    want[b] = x[b] * cos[i] + x[a] * sin[i]
                assert torch.allclose(k[layer, t, 1], want, rtol=1e-12)
                assert torch.allclose(v[layer, t, 1], case["kv"][t, layer, 1, 1] * 0.7, rtol=1e-12)
