# SPDX-License-Identifier: Apache-2.0
"""Step 4: train a DFlash 2 (or DFlash) drafter on cached features.

    python -m examples.smollm2.train --steps 3000
    python -m examples.smollm2.train --steps 3000 --method dflash

Block cross-entropy with position decay, half of it against the target's own distribution; the selector learns
on the drafter's top candidates with the true predecessor. The state is saved at every evaluation: the same
command goes on where it stopped. `best.pt` is the step with the highest held-out acceptance length.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from examples.smollm2.data import TRAINING, Batch, batches, cut_vocabulary, load_sequences
from examples.smollm2.features import TAPS, load_target
from examples.smollm2.model import (
    Drafter,
    Shape,
    block_ids,
    fit_head_norms,
    start_from_target,
    unit_scaled,
)
from examples.smollm2.replay import Replay


def shape_for(target: Any, taps: tuple[int, ...], layers: int, block: int, mask: int, rank: int) -> Shape:
    """The drafter's shape: layers like the target's."""
    config = target.config
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        layers=layers,
        vocabulary=config.vocab_size,
        target_layers=config.num_hidden_layers,
        taps=taps,
        block_size=block,
        mask_token_id=mask,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        max_position=config.max_position_embeddings,
        selector_rank=rank,
    )


class HeadLoss(torch.autograd.Function):
    """Cross-entropy through the output head, without the five [M, Vc] copies that autograd would keep."""

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, head: Tensor, hard: Tensor, soft: Tensor, soft_places: Tensor, top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [M, H], places of labels hard [M, 1], chances soft [M, n] at soft_places.

        The hard label weighs 1 - sum(soft). Returns each row's loss [M], the top scores [M, C] and their places.
        """
        logits = hidden @ head.T
        scores, places = logits.topk(top, dim=-1)
        peak = scores[:, :1].float()
        rest = 1 - soft.sum(-1, keepdim=True)
        wanted = rest * logits.gather(-1, hard) + (soft * logits.gather(-1, soft_places)).sum(-1, keepdim=True)
        chances = logits.sub_(scores[:, :1]).exp_()
        total = chances.sum(-1, keepdim=True).float()
        context.save_for_backward(chances, total, head, hard, rest, soft, soft_places, places)
        context.mark_non_differentiable(places)
        return (peak + total.log() - wanted)[:, 0], scores.float(), places

    @staticmethod
    def backward(context: Any, by_loss: Tensor, by_scores: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        chances, total, head, hard, rest, soft, soft_places, places = context.saved_tensors
        by_loss = by_loss[:, None]
        dense = (chances * (by_loss / total).to(chances.dtype)) @ head
        few = torch.cat((-by_loss * rest, -by_loss * soft, by_scores), dim=-1).to(head.dtype)
        rows = head[torch.cat((hard, soft_places, places), dim=-1)]
        return dense + (few[:, None] @ rows)[:, 0], None, None, None, None, None, None


class Loss:
    """The training loss, with the target's output head cut to the tokens that the data shows."""

    def __init__(self, embeddings: Tensor, head: Tensor, ids: Tensor, decay: float, soft: float) -> None:
        self.embeddings, self.scaled = embeddings, unit_scaled(embeddings)
        self.head, self.ids = head[ids].to(torch.bfloat16), ids
        self.place = torch.full((len(embeddings),), -1)
        self.place[ids] = torch.arange(len(ids))
        self.decay, self.soft = decay, soft

    def __call__(self, drafter: Drafter, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The mean loss over all slots with a label, and figures for the progress bar."""
        embedded = self.embeddings[block_ids(batch.anchor_ids, drafter)].float()
        hidden = drafter(batch.taps, embedded, batch.anchors)[:, :, 1:]
        valid = batch.labels >= 0
        slot = torch.arange(valid.shape[-1]).expand_as(valid)[valid]
        weight = torch.exp(-slot / self.decay)
        weight = weight / weight.sum()
        hidden, labels, soft_ids = hidden[valid], batch.labels[valid], batch.soft_ids[valid]
        soft_places = self.place[soft_ids]
        soft = self.soft * batch.soft_chances[valid] * (soft_places >= 0)
        each, scores, top = HeadLoss.apply(
            hidden.to(torch.bfloat16),
            self.head,
            self.place[labels][:, None],
            soft,
            soft_places.clamp(min=0),
            drafter.shape.selector_top,
        )
        loss = (each * weight).sum()
        candidates = self.ids[top]
        is_label = candidates == labels[:, None]
        figures = {"loss": loss.item(), "slot1": is_label[slot == 0, 0].float().mean().item()}
        if not drafter.shape.is_dflash2:
            return loss, figures

        previous = torch.cat((batch.anchor_ids[..., None], batch.labels[..., :-1]), dim=-1)[valid]
        scores = scores + drafter.candidate_selector(hidden, previous, candidates, self.scaled)
        goal = (soft[:, None, :] * (candidates[:, :, None] == soft_ids[:, None, :])).sum(-1)
        goal = goal + (1 - soft.sum(-1, keepdim=True)) * is_label
        picked = -(goal * scores.log_softmax(-1)).sum(-1)
        picked_loss = (picked * weight).sum()
        right = is_label.gather(-1, scores.argmax(-1, keepdim=True))
        figures |= {"selector": picked_loss.item(), "picked": right.float().mean().item()}
        return loss + picked_loss, figures


def make_optimizer(drafter: Drafter, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, and a higher rate for what starts from nothing."""
    fresh = ("candidate_selector", "conv")
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in drafter.named_parameters():
        key = (any(part in name for part in fresh), parameter.dim() == 2 and "rows" not in name)
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": group, "scale": 2.0 if is_fresh else 1.0, "weight_decay": decay if decays else 0.0}
            for (is_fresh, decays), group in groups.items()
        ],
        lr=rate,
        betas=(0.9, 0.95),
    )


def schedule(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine to 4 %."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """Run the training; returns the best held-out acceptance lengths by kind."""
    torch.manual_seed(arguments.seed)
    target = load_target(arguments.target).to(arguments.device)
    embeddings = target.get_input_embeddings().weight.detach().clone()
    head = target.get_output_embeddings().weight.detach().clone()
    rank = arguments.selector_rank if arguments.method == "dflash2" else 0
    shape = shape_for(target, tuple(arguments.taps), arguments.layers, arguments.block_size, arguments.mask, rank)
    slots = shape.block_size - 1
    sequences = load_sequences(arguments.tokens)
    held_out = [s for s in load_sequences(arguments.held_out) if s.temperature == 0][: arguments.held_out_sequences]
    ids = cut_vocabulary(sequences + held_out, shape.vocabulary)
    print(
        f"train: {len(sequences)} sequences, {sum(len(s.tokens) - s.prompt_length for s in sequences)} tokens of "
        f"the target, {len(held_out)} held out, output head cut to {len(ids)} tokens",
        flush=True,
    )
    drafter = Drafter(shape, arguments.dropout)
    loss_of, replay = (
        Loss(embeddings, head, ids, arguments.decay, arguments.soft),
        Replay(embeddings, head, ids),
    )
    if arguments.start == "target":
        start_from_target(drafter, target)
        if not hasattr(target.model.layers[0].self_attn, "q_norm"):
            some = next(batches(sequences, 4, 8, slots, np.random.default_rng(0))).to(embeddings.device)
            fit_head_norms(drafter, some.taps.float(), embeddings[block_ids(some.anchor_ids, drafter)].float())
    del target
    optimizer = make_optimizer(drafter, arguments.rate, arguments.weight_decay)
    out: Path = arguments.out or TRAINING / arguments.method
    out.mkdir(parents=True, exist_ok=True)
    step, best, seconds = 0, {"all": 0.0}, 0.0
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt", map_location=arguments.device, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        optimizer.load_state_dict(state["optimizer"])
        step, best, seconds = state["step"], state["best"], state["seconds"]
        print(f"train: going on at step {step}", flush=True)
    elif arguments.warm is not None:
        drafter.load_state_dict(torch.load(arguments.warm, map_location=arguments.device, weights_only=True)["drafter"])
    feed = batches(
        sequences, arguments.sequences, arguments.blocks, slots, np.random.default_rng([arguments.seed, step])
    )
    mean: dict[str, float] = {}
    with tqdm(initial=step, total=arguments.steps, desc="train", unit="step", mininterval=2) as bar:
        while step < arguments.steps:
            began = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = arguments.rate * group["scale"] * schedule(step, arguments.steps, arguments.warmup)
            with torch.autocast(arguments.device, torch.bfloat16):
                loss, figures = loss_of(drafter, next(feed).to(embeddings.device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            step += 1
            seconds += time.monotonic() - began
            mean = {key: value + 0.98 * (mean.get(key, value) - value) for key, value in figures.items()}
            bar.update(1)
            bar.set_postfix({key: f"{value:.3f}" for key, value in mean.items()}, refresh=False)
            if step % arguments.evaluate_every == 0 or step == arguments.steps:
                drafter.eval()
                lengths = replay.acceptance_length(drafter, held_out)
                drafter.train()
                record = {"step": step, "seconds": round(seconds), **mean, "acceptance": lengths}
                tqdm.write(json.dumps(record))
                with (out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
                if lengths["all"] > best["all"]:
                    best = lengths
                    kept = {"drafter": drafter.state_dict(), "shape": shape.as_dict(), "record": record}
                    torch.save(kept, out / "best.pt")
                state = {"drafter": drafter.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state | {"best": best, "seconds": seconds}, out / "state.partial.pt")
                (out / "state.partial.pt").rename(out / "state.pt")
    return best


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--tokens", type=Path, default=TRAINING / "prompts", help="shards with features")
    parser.add_argument("--held-out", type=Path, default=TRAINING / "held-out", help="shards for early stopping")
    parser.add_argument("--out", type=Path, help="folder (default .demo/training/METHOD)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", choices=("dflash2", "dflash"), default="dflash2")
    parser.add_argument("--start", choices=("target", "random"), default="target", help="where the layers start from")
    parser.add_argument("--warm", type=Path, help="start from this best.pt")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--sequences", type=int, default=8, help="sequences a step")
    parser.add_argument("--blocks", type=int, default=32, help="blocks a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--taps", type=int, nargs="+", default=TAPS)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--mask", type=int, default=16, help="id of the mask token: one that no text holds")
    parser.add_argument("--selector-rank", type=int, default=48)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--dropout", type=float, default=0.1, help="on what a sublayer adds")
    parser.add_argument("--decay", type=float, default=3.0, help="slot j weighs exp(-(j-1)/decay)")
    parser.add_argument("--soft", type=float, default=0.5, help="share of the target's own distribution in the loss")
    parser.add_argument("--evaluate-every", type=int, default=250)
    parser.add_argument("--held-out-sequences", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    chosen = parse()
    with torch.device(chosen.device):
        print(json.dumps(train(chosen), indent=2))
