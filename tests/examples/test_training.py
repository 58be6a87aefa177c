# SPDX-License-Identifier: Apache-2.0
"""The recipe's own pieces: the training forward, the loss, the batches and the prompts."""

import json
import sysconfig
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.smollm2.data import Sequence, batches, frequent_tokens
from examples.smollm2.export import published
from examples.smollm2.features import tapped
from examples.smollm2.model import Drafter, Shape, block_ids, unit_scaled
from examples.smollm2.prompts import make_prompts
from examples.smollm2.train import HeadLoss, Loss, schedule
from tests.reference.config import read_config
from tests.reference.dflash import ReferenceDrafter
from tests.reference.target import ReferenceTarget
from tests.support.checkpoints import DrafterShape, TargetShape, drafter_config, make_target

SHAPE = Shape(
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=96,
    layers=2,
    vocabulary=128,
    target_layers=4,
    taps=(0, 1, 3),
    block_size=8,
    mask_token_id=0,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position=1024,
    selector_rank=8,
    selector_top=4,
)


def random_drafter(shape: Shape) -> Drafter:
    """Every parameter away from its start, so that no part is the identity."""
    torch.manual_seed(1)
    drafter = Drafter(shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


def random_block(drafter: Drafter, anchors: list[int], length: int) -> tuple[torch.Tensor, ...]:
    """(taps, embedded, anchors, anchor ids, embeddings) of one sequence."""
    generator = torch.Generator().manual_seed(2)
    embeddings = torch.randn(drafter.shape.vocabulary, 64, generator=generator)
    taps = torch.randn(1, length, 3 * 64, generator=generator)
    ids = torch.randint(3, 128, (1, len(anchors)), generator=generator)
    return taps, embeddings[block_ids(ids, drafter)], torch.tensor([anchors]), ids, embeddings


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ReferenceTarget:
    folder = make_target(tmp_path_factory.mktemp("target"), TargetShape("llama", vocab_size=128))
    return ReferenceTarget(folder, torch.float32)


@pytest.mark.parametrize("rank", [8, 0], ids=["dflash2", "dflash"])
def test_forward_is_the_reference(rank: int, target: ReferenceTarget, tmp_path: Path) -> None:
    """Several anchors at once, against the independent drafter's dense batch-1 forward."""
    drafter = random_drafter(replace(SHAPE, selector_rank=rank))
    taps, _, anchors, ids, _ = random_block(drafter, [5, 6, 19], 23)
    embedded = target.embedding[block_ids(ids, drafter)]
    with torch.no_grad():
        hidden = drafter(taps, embedded, anchors)

    kind = DrafterShape(architecture="dflash2" if rank else "dflash")
    (tmp_path / "config.json").write_text(json.dumps(drafter_config(kind, TargetShape())))
    reference = ReferenceDrafter(read_config(tmp_path, 4), drafter.state_dict(), target)
    context = reference.context_kv(reference.context_features(taps[0]), torch.arange(23))
    for n, anchor in enumerate(anchors[0].tolist()):
        before = [(key[:anchor], value[:anchor]) for key, value in context]
        rows = anchor + torch.arange(8)[None]
        with torch.no_grad():
            expected = reference.block_hidden(block_ids(ids[:, n], drafter), rows, before, torch.arange(anchor))
        torch.testing.assert_close(hidden[0, n], expected[0], rtol=1e-4, atol=1e-4)


def test_a_block_sees_only_the_context_before_its_anchor() -> None:
    drafter = random_drafter(SHAPE)
    taps, embedded, anchors, _, _ = random_block(drafter, [5, 19], 23)
    with torch.no_grad():
        hidden = drafter(taps, embedded, anchors)
        later = taps.clone()
        later[:, 5:] += 1.0
        changed = drafter(later, embedded, anchors)
        earlier = taps.clone()
        earlier[:, 4] += 1.0
        moved = drafter(earlier, embedded, anchors)
    torch.testing.assert_close(changed[0, 0], hidden[0, 0])
    assert not torch.allclose(changed[0, 1], hidden[0, 1], atol=1e-3)
    assert not torch.allclose(moved[0, 0], hidden[0, 0], atol=1e-3)


def test_folded_codebooks_score_like_the_selector() -> None:
    drafter = random_drafter(SHAPE)
    hidden, embeddings = torch.randn(3, 64), torch.randn(128, 64)
    previous, candidates = torch.tensor([1, 2, 3]), torch.randint(0, 128, (3, 4))
    with torch.no_grad():
        expected = drafter.candidate_selector(hidden, previous, candidates, unit_scaled(embeddings))
        weights = {name: weight.float() for name, weight in published(drafter, embeddings).items()}
        first = weights["candidate_selector.predecessor_codebook"][previous]
        second = weights["candidate_selector.successor_codebook"][candidates]
        projected = hidden @ weights["candidate_selector.hidden_projection.weight"].T
    torch.testing.assert_close(((first * projected)[:, None] * second).sum(-1), expected, rtol=0.05, atol=0.05)


def test_head_loss_has_the_gradient_of_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    hidden, head = normal(6, 16).requires_grad_(), normal(50, 16)
    hard = torch.randint(0, 50, (6, 1), generator=generator)
    places = torch.stack([torch.randperm(50, generator=generator)[:5] for _ in range(6)])
    soft = 0.1 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
    by_loss, by_scores = normal(6), normal(6, 4)

    logits = hidden @ head.T
    goal = torch.zeros_like(logits).scatter_add(-1, hard, 1 - soft.sum(-1, keepdim=True))
    goal = goal.scatter_add(-1, places, soft)
    expected = -(goal * logits.log_softmax(-1)).sum(-1)
    top = logits.topk(4)
    (slope,) = torch.autograd.grad((expected * by_loss).sum() + (top.values * by_scores).sum(), hidden)

    loss, scores, best = HeadLoss.apply(hidden, head, hard, soft, places, 4)
    (own,) = torch.autograd.grad((loss * by_loss).sum() + (scores * by_scores).sum(), hidden)
    assert torch.equal(best, top.indices)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(own, slope, rtol=1e-5, atol=1e-5)


def ramp(length: int, prompt_length: int) -> Sequence:
    """Tokens 10, 11, 12, … whose taps and soft targets tell the position."""
    positions = np.arange(length)
    soft_ids = np.repeat(positions[:, None] + 11, 16, axis=1)
    taps = positions[:, None].astype(np.uint16)
    chances = np.full((length, 16), 1 / 16)
    return Sequence(positions + 10, taps, soft_ids, chances, prompt_length, 0.0, "chat")


def test_labels_stand_behind_their_anchor() -> None:
    """Slot j predicts the token at anchor + j, and its soft target is the target's view from one token before."""
    batch = next(batches([ramp(30, 4), ramp(25, 8)], 2, 6, 7, np.random.default_rng(0)))
    assert batch.taps.shape == (2, 64, 1)
    assert torch.equal(batch.anchor_ids, batch.anchors + 10)
    expected = batch.anchors[..., None] + torch.arange(1, 8) + 10
    inside = batch.labels >= 0
    assert torch.equal(batch.labels[inside], expected[inside])
    assert torch.equal(batch.soft_ids[..., 0][inside], expected[inside])
    lengths = sorted((25, 30))
    for row, length in enumerate(sorted(lengths, reverse=bool(batch.labels[0].max() > 34))):
        assert torch.equal(inside[row], expected[row] < length + 10)
        assert batch.anchors[row].min() >= {30: 4, 25: 8}[length]


def test_short_batches_have_half_the_slots_in_twice_the_blocks() -> None:
    feed = batches([ramp(30, 4), ramp(25, 8)], 2, 6, 7, np.random.default_rng(0), short=0.5)
    assert {tuple(next(feed).labels.shape) for _ in range(20)} == {(2, 6, 7), (2, 12, 3)}


def test_the_cut_head_holds_every_label() -> None:
    loss_of = Loss(torch.randn(128, 64), torch.randn(128, 64), torch.tensor([3, 5]), decay=4.0, soft=0.5, others=10)
    labels = torch.tensor([[120, -1], [7, 3]])
    loss_of.cut(labels)
    assert {3, 5, 7, 120} <= set(loss_of.ids.tolist()) and len(loss_of.ids.unique()) == 12
    assert torch.equal(loss_of.ids[loss_of.place[loss_of.ids]], loss_of.ids)
    assert torch.equal(loss_of.head, loss_of.whole_head[loss_of.ids])


def test_frequent_tokens_are_the_most_frequent() -> None:
    sequence = ramp(30, 4)
    sequence.tokens = np.array([1] * 10 + [7] * 12 + [5] * 8)
    sequence.soft_ids = np.full((30, 16), 40)
    assert frequent_tokens([sequence], 128, 2).tolist() == [1, 7]
    assert frequent_tokens([sequence], 128, 128).tolist() == [1, 5, 7, 40]


def test_schedule_warms_up_stays_and_falls_to_nothing() -> None:
    factors = [schedule(step, 100, 10, 0.3) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and factors[9:71] == [1.0] * 62
    assert all(later < earlier for earlier, later in pairwise(factors[70:])) and factors[100] == 0


def test_loss_reaches_every_parameter() -> None:
    drafter = random_drafter(replace(SHAPE, selector_top=64))
    embeddings = torch.randn(128, 64)
    sequence = ramp(30, 4)
    sequence.taps = np.random.default_rng(0).normal(size=(30, 192)).astype(np.float16).view(np.uint16)
    batch = next(batches([sequence, sequence], 2, 6, 7, np.random.default_rng(0)))
    loss_of = Loss(embeddings, embeddings, torch.arange(128), decay=4.0, soft=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = loss_of(drafter, batch)
    loss.backward()
    missing = [name for name, parameter in drafter.named_parameters() if parameter.grad is None]
    silent = [name for name, p in drafter.named_parameters() if p.grad is not None and not p.grad.any()]
    assert (missing, silent) == ([], [])


def test_taps_are_the_layers_outputs(target: ReferenceTarget) -> None:
    tokens = [3, 9, 27, 81, 5]
    features, logits = tapped(target.model, torch.tensor([tokens]), (0, 1, 3))
    expected_logits, expected = target.run(tokens, (0, 1, 3))
    torch.testing.assert_close(features[0], expected)
    torch.testing.assert_close(logits[0], expected_logits)


def test_prompts_of_the_splits_do_not_meet() -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    training = make_prompts(files, 300, held_out=False, seed=0)
    held_out = make_prompts(files, 300, held_out=True, seed=0)
    assert training == make_prompts(files, 300, held_out=False, seed=0)
    assert {prompt["kind"] for prompt in held_out} == {prompt["kind"] for prompt in training}
    asked = {str(prompt.get("messages")) for prompt in training if prompt["kind"] in ("code_chat", "chat")}
    assert not asked & {str(prompt.get("messages")) for prompt in held_out}
