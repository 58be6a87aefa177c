# SPDX-License-Identifier: Apache-2.0
"""What every implementation of an operation must satisfy, against the references in float64.

`run` is the implementation, called with the public function's arguments: the extension, the fp32 reference,
or the CUDA kernels under emulation or on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.ops import cases
from tests.ops.cases import Arguments
from vllm_dflash.ops import noise, projection
from vllm_dflash.ops.reference import context_kv, convolution, rejection, selector
from vllm_dflash.ops.reference.sampling import softmax_or_zero

Run = Callable[..., object]

# fp32 sums may differ by this much of the largest value; a 16-bit result may differ by one rounding on top.
FP32 = 1e-5
ONE_ROUNDING = {torch.float32: 0.0, torch.float64: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def double(arguments: Arguments) -> Arguments:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()}


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str, terms: float = 0.0) -> None:
    """Within FP32 of the tensor's largest value (or of the sums' terms, where a sum may cancel), plus one
    rounding of the result's type for each entry."""
    if want.numel() == 0:
        assert got.shape == want.shape
        return
    allowed = FP32 * want.abs().max().clamp(min=terms) + ONE_ROUNDING[got.dtype] * want.abs()
    wrong = (got.double() - want).abs() - allowed
    assert got.shape == want.shape and not got.isnan().any(), what
    assert wrong.max() <= 0, f"{what}: off by {float((got.double() - want).abs().max())}"


def check_convolution(run: Run, case: Arguments) -> None:
    got = run(**case)
    assert got.dtype == case["x"].dtype
    assert_near(got, convolution.grouped_convolution(**double(case)), "convolution", terms=1.0)


def check_path(run: Run, case: Arguments) -> None:
    """Scores near float64's along the path that was taken; each choice is float64's, or within rounding of
    it."""
    tokens, scores = run(**case)
    assert tokens.dtype == torch.int64 and scores.dtype == torch.float32
    batch, slots, _ = case["candidate_ids"].shape
    for b in range(batch):
        last, temperature = case["anchors"][b : b + 1], float(case["temperature"][b])
        for slot in range(slots):
            one = {k: v if k in ("predecessor", "successor") else v[b : b + 1] for k, v in double(case).items()} | {
                "anchors": last
            }
            for name in ("candidate_ids", "candidate_logits", "projected"):
                one[name] = one[name][:, slot : slot + 1]
            _, want = selector.select_path(**one)
            got, want = scores[b, slot].double(), want[0, 0]
            assert torch.equal(got.isfinite(), want.isfinite()), "scores: what is absent must be -inf"
            finite = want.isfinite()
            if not finite.any():
                assert (tokens[b, slot:] == -1).all(), "a slot without a finite score is no draft, with all after it"
                assert (scores[b, slot:] == -torch.inf).all()
                break
            assert_near(scores[b, slot][finite], want[finite], "scores", terms=1 / (temperature or 1.0))
            where = (case["candidate_ids"][b, slot] == tokens[b, slot]).nonzero()
            assert where.numel() >= 1 and finite[where[0, 0]], "the token must be a present candidate"
            assert_choice(got, int(where[0, 0]), temperature, one, slot + 1)
            last = tokens[b : b + 1, slot]


def assert_choice(scores: torch.Tensor, choice: int, temperature: float, one: Arguments, slot: int) -> None:
    """The choice follows from the implementation's own scores: first maximum, or inverse CDF."""
    if temperature == 0:
        assert choice == int(scores.argmax()), "T = 0 takes the first maximum"
        return
    p = softmax_or_zero(scores)
    u = float(noise.uniform(one["seeds"], one["anchor_positions"], slot, noise.DRAFT))
    high = float(p[: choice + 1].sum())
    assert p[choice] > 0 and high - float(p[choice]) - 1e-6 <= u <= high + 1e-6, "not the inverse CDF's choice"


def check_rejection(run: Run, case: Arguments) -> None:
    """Equal to float64's decisions; where they differ, the decision must have stood within 1e-5 of the other
    side."""
    output, accepted = run(**case)
    assert output.dtype == torch.int32 and accepted.dtype == torch.int32
    want, want_accepted = rejection.reject_sparse(**double(case))
    assert output.shape == want.shape and accepted.shape == want_accepted.shape
    for b in range(output.shape[0]):
        differ = (output[b] != want[b]).nonzero()
        if differ.numel() == 0:
            assert accepted[b] == want_accepted[b], "accepted drafts"
            continue
        first = int(differ[0, 0])
        assert on_the_edge(case, b, first, int(output[b, first])), (
            f"request {b}, slot {first + 1}: {output[b].tolist()} instead of {want[b].tolist()}"
        )


def on_the_edge(case: Arguments, b: int, column: int, token: int) -> bool:
    """Whether float64 takes `token` too, when u moves by 1e-5 (relative to the probability, for
    acceptance)."""
    case = double(case)
    start, end = int(case["cu_drafts"][b]), int(case["cu_drafts"][b + 1])
    key = case["seeds"][b : b + 1], case["anchor_positions"][b : b + 1]
    temperature = case["temperature"][b : b + 1]
    if start + column >= end:
        p = rejection.target_probabilities(case["logits"], case["bonus_rows"][b : b + 1], temperature)[0]
        return near_inverse_cdf(p, token, float(noise.uniform(*key, column + 1, noise.BONUS)))
    n = start + column
    p = rejection.target_probabilities(case["logits"], case["draft_rows"][n : n + 1], temperature)[0]
    draft = case["draft_ids"][n : n + 1]
    q = rejection.proposal(draft, case["candidate_ids"][n : n + 1], case["candidate_scores"][n : n + 1], p.shape[0])[0]
    if 0 <= int(draft) < p.shape[0]:
        bound = float(noise.uniform(*key, column + 1, noise.ACCEPT) * q[int(draft)])
        if abs(bound - float(p[int(draft)])) <= 1e-5 * max(bound, float(p[int(draft)])):
            return True
    residual = (p - q).clamp(min=0)
    if residual.sum() < 1e-5:  # a rejection of that probability cannot be told from none
        return True
    return near_inverse_cdf(residual / residual.sum(), token, float(noise.uniform(*key, column + 1, noise.RECOVER)))


def near_inverse_cdf(p: torch.Tensor, token: int, u: float) -> bool:
    high = float(p[: token + 1].sum())
    return token >= 0 and float(p[token]) > 0 and high - float(p[token]) - 1e-5 <= u <= high + 1e-5


def check_context_rows(run: Run, case: Arguments) -> None:
    got = run(**case)
    want = context_kv.context_kv_rows(**double(case))
    for name, x, y in zip("kv", got, want, strict=True):
        assert x.dtype == case["kv"].dtype and x.is_contiguous()
        assert_near(x, y, name)


def check_injection(run: Run, case: Arguments, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Written slots near float64's (fp8: equal to torch's conversion of fp32, but for values that rounding
    moves across a step), all others untouched bit for bit."""
    before = [x.clone() for x in (*keys, *values)]
    run(**case, key_caches=keys, value_caches=values)
    wide = [torch.zeros(x.shape, dtype=torch.float64) for x in before]
    fp8 = keys[0].dtype == torch.float8_e4m3fn if keys else False
    scales = (case.get("k_scale", 1.0), case.get("v_scale", 1.0)) if fp8 else (1.0, 1.0)
    layers = len(keys)
    context_kv.inject_context_kv(
        **double({k: v for k, v in case.items() if k not in ("k_scale", "v_scale")}),
        key_caches=wide[:layers], value_caches=wide[layers:], k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
    written = [torch.zeros(x.shape, dtype=torch.uint8) for x in before]
    mark = double(case) | {"kv": torch.ones_like(case["kv"], dtype=torch.float64), "value_scale": None}
    ones = {"k_norm": torch.full_like(mark["k_norm"], 2.0), "cos_sin": torch.ones_like(mark["cos_sin"])}
    ones["cos_sin"][:, ones["cos_sin"].shape[1] // 2 :] = 0.0
    context_kv.inject_context_kv(
        **{k: v for k, v in (mark | ones).items() if k not in ("k_scale", "v_scale")},
        key_caches=written[:layers], value_caches=written[layers:], k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
    for i, (new, old, want, touched) in enumerate(zip((*keys, *values), before, wide, written, strict=True)):
        mask = touched > 0
        assert torch.equal(bits(new)[~mask], bits(old)[~mask]), "a slot that is not mapped was written"
        if not mask.any():
            continue
        if fp8:
            assert_fp8(new.view(torch.uint8)[mask], want[mask] / scales[i >= layers])
        else:
            assert_near(new[mask], want[mask], "cache")


def check_projection(
    run: Run, case: Arguments, keys: list[torch.Tensor], values: list[torch.Tensor], rounding: float
) -> None:
    """Caches near float64's of the same arguments. `rounding`: how much of the largest value the
    implementation may lose to 16-bit intermediates (0 where it has none)."""
    before = [x.clone() for x in (*keys, *values)]
    run(**case, key_caches=keys, value_caches=values)
    wide = [x.double() for x in before]
    exact = double(case)
    if case["weight_scale"] is not None:
        exact["kv_weight"] = exact["kv_weight"].double()
    kv = projection.project(
        *(exact[name] for name in ("features", "kv_weight", "weight_scale", "bias", "eps")), *case["k_norm"].shape
    )
    names = ("k_norm", "eps", "positions", "cos_sin", "is_neox", "value_scale", "slot_mapping", "block_size")
    context_kv.inject_context_kv(
        kv, **{name: exact[name] for name in names},
        key_caches=wide[: len(keys)], value_caches=wide[len(keys) :], k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
    for new, want in zip((*keys, *values), wide, strict=True):
        allowed = (FP32 + rounding) * want.abs().max() + ONE_ROUNDING[new.dtype] * want.abs()
        assert ((new.double() - want).abs() <= allowed).all(), float((new.double() - want).abs().max())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_fp8(stored: torch.Tensor, want: torch.Tensor) -> None:
    """Each number is torch's conversion of one within FP32 of the wanted."""
    slack = FP32 * want.abs().max()
    low, high = ((want + d).float().clamp(-448, 448).to(torch.float8_e4m3fn).float() for d in (-slack, slack))
    number = stored.view(torch.float8_e4m3fn).float()
    assert ((number >= low) & (number <= high)).all(), "fp8"


def check_path_without_finite_scores(run: Run) -> None:
    """NaN, -inf and absent candidates are never chosen; a slot without a finite score ends the draft."""
    case = cases.path(7, batch=4, slots=3, candidates=4, rank=8, vocabulary=20, dtype=torch.float32)
    case["candidate_logits"][0, 1] = -torch.inf
    case["candidate_logits"][1, 0] = torch.nan
    case["candidate_ids"][2, 1, :3] = torch.tensor([-1, 20, 1 << 40])
    case["anchors"][3] = 20
    check_path(run, case)
    tokens, _ = run(**case)
    assert (tokens[0] >= 0).tolist() == [True, False, False]
    assert tokens[1].tolist() == [-1, -1, -1] and tokens[3].tolist() == [-1, -1, -1]
    assert tokens[2, 1] == case["candidate_ids"][2, 1, 3]


def check_rejection_of_odd_rows(run: Run) -> None:
    """Rows all -inf or NaN give -1, +inf takes all of p, no draft recovers from p, padding stays -1."""
    case = cases.rejection(8, [1, 1, 1, 0, 2], vocabulary=50, candidates=3, dtype=torch.float32)
    case["temperature"] = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    case["bonus_rows"] = torch.tensor([-1, -1, -1, -1, -1])
    case["draft_ids"][:] = 1
    case["logits"][case["draft_rows"][0]] = -torch.inf
    case["logits"][case["draft_rows"][1]] = torch.nan
    case["logits"][case["draft_rows"][2], 33] = torch.inf
    case["draft_ids"][3] = -1
    check_rejection(run, case)
    output, accepted = run(**case)
    assert output[0, 0] == -1 and output[1, 0] == -1 and output[2, 0] == 33 and (output[3] == -1).all()
    assert output[4, 0] >= 0 and output[4, 1] == -1 and accepted.tolist() == [0, 0, 0, 0, 0]


def check_conversions(run: Run) -> None:
    """The stored bits of values are torch's for every exponent and mantissa: bf16, fp16, and fp8 with its saturation.

    Numbers below fp32's normal range are left out: processors' own bf16 conversion takes them for 0.
    """
    rng = cases.generator(0)
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = (patterns | cases.integers(rng, 0, 1 << 16, 1 << 16).int()).view(torch.float32)
    ties = patterns.view(torch.float32) * (1 + 2.0**-8)  # halfway between two bf16 numbers
    x = torch.cat([x, ties, torch.linspace(-500, 500, 1 << 16), torch.linspace(-0.02, 0.02, 1 << 16)])
    x = torch.where(x.isnan() | (x.abs() < 2.0**-126), 1.0, x)
    case = cases.context(0, x.numel() // 128, 1, 1, 128, torch.float32, is_neox=True)
    case["kv"][:, 0, 1, 0] = x.view(-1, 128)
    rows = case["kv"].shape[0]
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        keys, values = cases.caches(0, 1, rows, 1, 1, 128, dtype, "NHD")
        run(
            **case, key_caches=keys, value_caches=values, slot_mapping=torch.arange(rows), block_size=1,
            k_scale=1.0, v_scale=1.0,
        )  # fmt: skip
        want = (x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x).to(dtype)
        assert torch.equal(bits(values[0]).flatten(), bits(want)), dtype
