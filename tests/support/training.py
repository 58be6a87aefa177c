# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny drafter on a tiny target's own samples, in seconds: tests see acceptance that really varies.

A random drafter is accepted about once in V tokens, so nothing beyond the first slot is ever exercised. Training
takes random anchors in the target's samples, one block an anchor, and cross entropy on every slot; for DFlash 2
also on the selector's scores with the true predecessor.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.reference.config import read_config
from tests.reference.dflash import ReferenceDrafter
from tests.reference.target import ReferenceTarget
from tests.support.checkpoints import (
    DrafterShape,
    Pair,
    TargetShape,
    drafter_config,
    make_pair,
    write_drafter,
)

FIXED = ("d2t", "t2d")
TEXT_TEMPERATURE = 0.5
TRAINED_TARGET = TargetShape(vocab_size=32, mixing=0.3)
"""A target that a drafter of two layers learns in some hundred steps: two thirds of first slots right."""


def sample_texts(
    target: ReferenceTarget, count: int, length: int, temperature: float, generator: torch.Generator
) -> torch.Tensor:
    """`count` sampled continuations of one random token each, [count, length]."""
    vocabulary = len(target.embedding)
    texts = torch.randint(3, vocabulary, (count, 1), generator=generator)
    cache = None
    with torch.no_grad():
        for _ in range(length - 1):
            out = target.model(texts[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = (out.logits[:, -1] / temperature).softmax(-1)
            texts = torch.cat([texts, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return texts


def block_loss(drafter: ReferenceDrafter, target: ReferenceTarget, text: torch.Tensor, anchors: torch.Tensor):
    """Mean cross entropy of all slots of the blocks at `anchors` [N] in `text` [T]."""
    config = drafter.config
    _, taps = target.run(text.tolist(), config.target_layer_ids)
    context_positions = torch.arange(len(text))
    context = drafter.context_kv(drafter.context_features(taps), context_positions)
    positions = anchors[:, None] + torch.arange(config.block_size)
    truth = text[positions]
    blocks = torch.full_like(truth, config.mask_token_id)
    blocks[:, 0] = truth[:, 0]
    hidden = drafter.block_hidden(blocks, positions, context, context_positions)[:, 1:]
    logits = drafter.logits(hidden)
    labels = truth[:, 1:]
    if "d2t" in drafter.weights:
        of_target = torch.full((config.vocab_size,), -100)
        kept = torch.arange(config.draft_vocab_size) + drafter.weights["d2t"]
        of_target[kept] = torch.arange(config.draft_vocab_size)
        labels = of_target[labels]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if config.second:
        everything = torch.arange(config.vocab_size).expand(*labels.shape, -1)
        scores = logits + drafter.transition(hidden, truth[:, :-1], everything)
        loss = loss + F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    return loss


def soften(weights: dict[str, torch.Tensor]) -> None:
    """Turns a random drafter into a start for training: layers near the identity, a weak selector."""
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "kernel_projection.weight")):
            weight.mul_(0.2)
        elif name.endswith("codebook"):
            weight.mul_(0.3)
        elif name.endswith("base_kernel"):
            weight[:, 0] = 1
            weight[:, 1:] = 0


def train_drafter(pair: Pair, directory: Path, steps: int, blocks: int = 64, rate: float = 1e-2) -> Path:
    """Trains the pair's drafter further and writes the result to `directory`."""
    shape = pair.drafter_shape
    generator = torch.Generator().manual_seed(shape.seed + 2)
    target = ReferenceTarget(pair.target, torch.float32)
    config = read_config(pair.drafter, len(target.layers))
    weights = load_file(pair.drafter / "model.safetensors")
    soften(weights)
    trainable = [weight.requires_grad_() for name, weight in weights.items() if name not in FIXED]
    drafter = ReferenceDrafter(config, weights, target)
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    texts = sample_texts(target, 256, 96, TEXT_TEMPERATURE, generator)
    for step in range(steps):
        text = texts[step % len(texts)]
        last = len(text) - config.block_size
        anchors = 1 + torch.randperm(last, generator=generator)[:blocks]
        optimizer.zero_grad()
        block_loss(drafter, target, text, anchors).backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        schedule.step()
    return write_drafter(directory, drafter_config(shape, pair.target_shape), weights, shape)


def make_trained_pair(
    directory: Path, drafter: DrafterShape, target: TargetShape = TRAINED_TARGET, steps: int = 500
) -> Pair:
    """A pair whose drafter is often right. Takes some 15 seconds on one core."""
    random_pair = make_pair(directory / "random", drafter, target)
    trained = train_drafter(random_pair, directory / "trained", steps)
    return Pair(random_pair.target, trained, target, drafter)
