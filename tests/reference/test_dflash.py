# SPDX-License-Identifier: Apache-2.0
"""Invariants of the reference itself: each would break if its part of the drafter were computed wrongly."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from tests.reference.dflash import ReferenceDrafter, read_drafter
from tests.reference.speculate import context_of, drafts_at, speculate
from tests.reference.target import ReferenceTarget
from tests.support.checkpoints import DrafterShape, TargetShape, make_drafter, make_target

TARGETS = {family: TargetShape(family=family, vocab_size=64) for family in ("qwen3", "llama")}
BOTH = pytest.mark.parametrize("architecture", ["dflash", "dflash2"])


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, ReferenceTarget]:
    root = tmp_path_factory.mktemp("targets")
    return {family: ReferenceTarget(make_target(root / family, shape)) for family, shape in TARGETS.items()}


@pytest.fixture
def target(targets) -> ReferenceTarget:
    return targets["qwen3"]


def drafter_of(directory: Path, target: ReferenceTarget, **shape) -> ReferenceDrafter:
    return read_drafter(make_drafter(directory, DrafterShape(**shape), TARGETS["qwen3"]), target)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def block_of(drafter: ReferenceDrafter, target: ReferenceTarget, token_ids: list[int], block: list[int]):
    """Hidden states [B, H] of one block behind the whole of `token_ids` as context."""
    context = context_of(target, drafter, token_ids)
    positions = len(token_ids) + torch.arange(len(block))
    return drafter.block_hidden(torch.tensor([block]), positions[None], context, torch.arange(len(token_ids)))[0]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_speculation_changes_no_token(tmp_path, targets, family, architecture):
    target = targets[family]
    drafter = drafter_of(tmp_path, target, architecture=architecture)
    trace = speculate(target, drafter, text(12), max_tokens=24)
    assert trace.token_ids == target.greedy(text(12), 24)
    assert all(len(step.drafts) == 7 for step in trace.steps)


def test_a_perfect_drafter_is_accepted_whole(tmp_path, target, monkeypatch):
    drafter = drafter_of(tmp_path, target)
    truth = text(12) + target.greedy(text(12), 40)

    def oracle(context, drafter, token_ids, anchor_position, num_drafts):
        drafts = truth[anchor_position + 1 : anchor_position + 8]
        return type("Draft", (), {"token_ids": drafts})()

    monkeypatch.setattr("tests.reference.speculate.drafts_at", oracle)
    trace = speculate(target, drafter, text(12), max_tokens=32)
    assert trace.token_ids == truth[12:44]
    assert [step.accepted for step in trace.steps] == [7, 7, 7, 7]


def test_taps_are_the_residual_stream(target):
    token_ids = text(10)
    _, taps = target.run(token_ids, (0, 2, 3))
    whole = target.model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    first, second, last = taps.chunk(3, dim=-1)
    assert same(first, whole.hidden_states[1][0])
    assert same(second, whole.hidden_states[3][0])
    assert same(target.model.model.norm(last), whole.hidden_states[4][0])


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_context_in_chunks_is_the_context_whole(tmp_path, target, chunks):
    drafter = drafter_of(tmp_path, target, attention_value_scale=0.5)
    token_ids = text(40)
    whole = context_of(target, drafter, token_ids)
    _, taps = target.run(token_ids, drafter.config.target_layer_ids)
    positions = torch.arange(40)
    pieces = [
        drafter.context_kv(drafter.context_features(part), at)
        for part, at in zip(taps.tensor_split(chunks), positions.tensor_split(chunks), strict=True)
    ]
    for layer, (key, value) in enumerate(whole):
        assert same(torch.cat([piece[layer][0] for piece in pieces]), key)
        assert same(torch.cat([piece[layer][1] for piece in pieces]), value)


@BOTH
def test_later_tokens_do_not_change_a_draft(tmp_path, target, architecture):
    drafter = drafter_of(tmp_path, target, architecture=architecture)
    token_ids = text(30)
    short = drafts_at(context_of(target, drafter, token_ids[:11]), drafter, token_ids[:11], 10)
    long = drafts_at(context_of(target, drafter, token_ids), drafter, token_ids, 10)
    assert short.token_ids == long.token_ids
    assert same(short.logits, long.logits)


def test_a_block_without_context_is_a_qwen3_forward(tmp_path, target):
    """Norms, projections, RoPE, grouped heads and MLP against transformers' Qwen3 with the same weights."""
    shape = DrafterShape(is_causal=True, attention_bias=False, rope_theta=5000.0)
    drafter = read_drafter(make_drafter(tmp_path, shape, TARGETS["qwen3"]), target)
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=64,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )
    ).to(torch.float64)
    own = {name: weight for name, weight in drafter.weights.items() if not name.startswith(("fc", "hidden_norm"))}
    model.load_state_dict(own | {"embed_tokens.weight": target.embedding})
    block = torch.tensor([text(9)])
    nothing = [(torch.zeros(0, 2, 32, dtype=torch.float64),) * 2] * shape.num_layers
    hidden = drafter.block_hidden(block, torch.arange(9)[None], nothing, torch.arange(0))
    assert torch.allclose(hidden, model(block).last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_causality_inside_the_block(tmp_path, target, causal):
    drafter = drafter_of(tmp_path, target, is_causal=causal)
    block = text(8, seed=1)
    before = block_of(drafter, target, text(20), block)
    after = block_of(drafter, target, text(20), [*block[:-1], (block[-1] + 1) % 64])
    assert same(before[:-1], after[:-1]) == causal
    assert not same(before[-1], after[-1])


@pytest.mark.parametrize("window", [4, 9])
def test_the_window_hides_older_context(tmp_path, target, window):
    """Row j of the block sees the last W - 1 - j context rows, and no other."""
    drafter = drafter_of(tmp_path, target, num_layers=1, use_swa=True, swa_window_size=window, is_causal=True)
    context = context_of(target, drafter, text(20))
    block, positions = torch.tensor([text(4, seed=1)]), 20 + torch.arange(4)[None]

    def hidden(changed: int) -> torch.Tensor:
        key, value = context[0][0].clone(), context[0][1].clone()
        key[changed], value[changed] = -key[changed], 3 * value[changed]
        return drafter.block_hidden(block, positions, [(key, value)], torch.arange(20))[0]

    original = drafter.block_hidden(block, positions, context, torch.arange(20))[0]
    for row, position in product(range(4), range(20)):
        seen = 20 + row - position < window
        assert same(hidden(position)[row], original[row]) != seen


def test_a_non_causal_window_limits_what_comes_after_too(tmp_path, target):
    drafter = drafter_of(tmp_path, target, num_layers=1, use_swa=True, swa_window_size=3)
    block = text(8, seed=1)
    before = block_of(drafter, target, text(20), block)
    after = block_of(drafter, target, text(20), [*block[:-1], (block[-1] + 1) % 64])
    assert [same(one, other) for one, other in zip(before, after, strict=True)] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_rope_depends_on_distances_only(tmp_path, target, is_neox_style):
    drafter = drafter_of(tmp_path, target, is_neox_style=is_neox_style)
    features = drafter.context_features(target.run(text(10), drafter.config.target_layer_ids)[1])
    block = torch.tensor([text(4, seed=1)])

    def at(offset: int) -> torch.Tensor:
        positions = offset + torch.arange(10)
        return drafter.block_hidden(
            block, offset + 10 + torch.arange(4)[None], drafter.context_kv(features, positions), positions
        )

    assert same(at(0), at(1000))


def test_rope_styles_pair_other_channels(tmp_path, target):
    """The interleaved style on q and k is the neox style with the channels dealt out anew."""
    neox = drafter_of(tmp_path / "neox", target, is_neox_style=True)
    dealt = drafter_of(tmp_path / "dealt", target, is_neox_style=False)
    order = torch.arange(32).reshape(2, 16).T.flatten()
    for name, weight in dealt.weights.items():
        if "q_proj" in name or "k_proj" in name:
            dealt.weights[name] = weight.unflatten(0, (-1, 32))[:, order].flatten(0, 1)
        elif "q_norm" in name or "k_norm" in name:
            dealt.weights[name] = weight[order]
    block = text(8, seed=1)
    assert same(block_of(neox, target, text(20), block), block_of(dealt, target, text(20), block))


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolution_by_its_formula(tmp_path, target, taps):
    drafter = drafter_of(tmp_path, target, architecture="dflash2", conv_kernel_size=taps, conv_group_size=8)
    x = torch.randn(2, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    base = drafter.weights["layers.1.mlp_conv.base_kernel"]
    dynamic = x @ drafter.weights["layers.1.mlp_conv.kernel_projection.weight"].T
    dynamic = dynamic.view(2, 5, 2, taps, 8)
    expected = x
    for side in range(2):
        out = torch.zeros_like(x)
        for block, row, channel, tap in product(range(2), range(5), range(64), range(taps)):
            if row >= tap:
                coefficient = base[side, tap, channel] + dynamic[block, row, side, tap, channel // 8]
                out[block, row, channel] += coefficient * expected[block, row - tap, channel]
        expected = out.square() if side == 0 else out
    assert same(drafter.convolved("layers.1.mlp_conv", x, torch.square), expected)


def test_blocks_do_not_see_each_other(tmp_path, target):
    drafter = drafter_of(tmp_path, target, architecture="dflash2")
    context, positions = context_of(target, drafter, text(20)), torch.arange(20)
    blocks = torch.tensor([text(8, seed=1), text(8, seed=2)])
    starts = torch.tensor([20, 13])
    places = starts[:, None] + torch.arange(8)
    together = drafter.block_hidden(blocks, places, context, positions)
    for index, start in enumerate(starts.tolist()):
        before = [(key[:start], value[:start]) for key, value in context]
        alone = drafter.block_hidden(blocks[index : index + 1], places[index : index + 1], before, positions[:start])
        assert same(together[index], alone[0])


def test_logits_are_multiplied_then_capped(tmp_path, target):
    drafter = drafter_of(tmp_path, target, architecture="dflash2", output_multiplier=3.0, final_logit_softcapping=2.0)
    hidden = torch.randn(4, 64, dtype=torch.float64)
    plain = hidden @ target.lm_head.T
    assert same(drafter.logits(hidden), 2.0 * torch.tanh(3.0 * plain / 2.0))


def test_greedy_path_is_the_best_successor_of_each_choice(tmp_path, target):
    drafter = drafter_of(tmp_path, target, architecture="dflash2", selector_top_k=6)
    token_ids = text(20)
    draft = drafts_at(context_of(target, drafter, token_ids), drafter, token_ids, 19)
    hidden = block_of(drafter, target, token_ids[:19], [token_ids[19]] + [0] * 7)[1:]
    projected = hidden @ drafter.weights["candidate_selector.hidden_projection.weight"].T
    before, after = (drafter.weights[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor"))
    previous, path = token_ids[19], []
    for slot in range(7):
        best = {}
        for candidate in draft.logits[slot].topk(6).indices.tolist():
            bilinear = (before[previous] * projected[slot] * after[candidate]).sum()
            best[candidate] = float(draft.logits[slot, candidate] + bilinear)
        previous = max(best, key=best.get)
        path.append(previous)
    assert draft.token_ids == path
    assert path != draft.logits.argmax(-1).tolist(), "the selector must matter here"


def test_sampled_path_follows_q(tmp_path, target):
    drafter = drafter_of(tmp_path, target, architecture="dflash2", block_size=2, selector_top_k=4)
    token_ids = text(20)
    context = context_of(target, drafter, token_ids[:19])
    generator = torch.Generator().manual_seed(0)
    draws = [drafter.draft(context, token_ids[19], temperature=2.0, generator=generator) for _ in range(2000)]
    greedy = drafter.draft(context, token_ids[19])
    expected = (greedy.scores[0] / 2.0).softmax(-1)
    counts = torch.zeros(4)
    for draw in draws:
        counts[greedy.candidate_ids[0].tolist().index(draw.token_ids[0])] += 1
    assert torch.allclose(counts / 2000, expected.float(), atol=0.04)
    assert same(draws[0].scores[0], greedy.scores[0] / 2.0)


def test_reduced_vocabulary_drafts_target_ids(tmp_path, target):
    drafter = drafter_of(tmp_path, target, draft_vocab_size=20)
    kept = torch.arange(20) + drafter.weights["d2t"]
    token_ids = text(20)
    draft = drafts_at(context_of(target, drafter, token_ids), drafter, token_ids, 19)
    assert draft.logits.shape == (7, 20)
    assert draft.token_ids == kept[draft.logits.argmax(-1)].tolist()
    assert max(draft.token_ids) > 20, "some id must lie beyond the reduced range"


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_mask_embedding_replaces_one_row(tmp_path, target, kind):
    plain = drafter_of(tmp_path / "plain", target)
    own = drafter_of(tmp_path / "own", target, mask_embedding=kind)
    rows = torch.arange(64)
    same_row = (plain.embed(rows) == own.embed(rows)).all(-1)
    assert same_row.tolist() == [False] + [True] * 63


def test_embedding_scale_and_own_tables(tmp_path, target):
    drafter = drafter_of(
        tmp_path,
        target,
        architecture="dflash2",
        input_embedding_scale=8.0,
        own_embedding=True,
        own_lm_head=True,
    )
    rows = torch.arange(64)
    assert same(drafter.embed(rows), 8.0 * drafter.weights["embed_tokens.weight"].double())
    assert drafter.lm_head is drafter.weights["lm_head.weight"]


@pytest.mark.parametrize("sinks", [True, False])
def test_attention_sinks_take_weight(tmp_path, target, sinks):
    """With one key of weight w and sink s, the output is that key's value scaled by w / (w + e^s)."""
    drafter = drafter_of(tmp_path, target, num_layers=1, attention_sink_bias=sinks or None)
    x = torch.randn(1, 1, 64, dtype=torch.float64)
    nothing = (torch.zeros(0, 2, 32, dtype=torch.float64),) * 2
    position = torch.tensor([[5]])
    out = drafter._attention(0, position, nothing, torch.arange(0))(x)
    key, value = drafter._key_value(0, x, position)
    weights = drafter.weights
    value = value.repeat_interleave(2, dim=2)
    if sinks:
        query = (x @ weights["layers.0.self_attn.q_proj.weight"].T).unflatten(-1, (4, 32))
        query = drafter._rotate(drafter._norm("layers.0.self_attn.q_norm", query), position)
        score = (query * key.repeat_interleave(2, dim=2)).sum(-1) * 32**-0.5
        value = value * torch.sigmoid(score - weights["layers.0.self_attn.attention_sink_bias"])[..., None]
    assert same(out, value.flatten(2) @ weights["layers.0.self_attn.o_proj.weight"].T)


def test_aliases_of_tensor_names(tmp_path, target):
    from safetensors.torch import load_file, save_file

    directory = make_drafter(tmp_path, DrafterShape(num_layers=1), TARGETS["qwen3"])
    plain = read_drafter(directory, target)
    renamed = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        name = name.replace("layers.0.", "midlayer.").replace("hidden_norm.", "encoder.output_norm_enc.")
        renamed["encoder." + name if name.startswith("fc.") else name] = weight
    save_file(renamed, directory / "model.safetensors")
    assert read_drafter(directory, target).weights.keys() == plain.weights.keys()


def test_shapes_vary_with_their_seed():
    from tests.support.checkpoints import drafter_weights

    one, other = (drafter_weights(replace(DrafterShape(), seed=seed), TargetShape()) for seed in (1, 2))
    assert one.keys() == other.keys()
    assert all(not torch.equal(one[name], other[name]) for name in one)
