# SPDX-License-Identifier: Apache-2.0
"""Step 4: train a DFlash 2 (or DFlash) drafter on cached features.

    python -m examples.smollm2.train --steps 3000
    python -m examples.smollm2.train --steps 3000 --method dflash

Block cross-entropy with position decay, half of it against the target's own distribution; the selector learns
on the drafter's top candidates with the true predecessor. The state is saved at every evaluation: the same
command goes on where it stopped, and new shards of `--tokens` are taken up then. The learning rate is constant until
the last part of the steps, so a run may be made longer (`--steps`) as long as that part has not begun. `best.pt` is
the moving average of the weights at the step with the highest held-out acceptance length.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from examples.smollm2.data import TRAINING, Batch, Data, batches, frequent_tokens, load_sequences
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

AVERAGE_EVERY = 4


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
        dense = chances * (by_loss / total).to(chances.dtype)
        few = torch.cat((-by_loss * rest, -by_loss * soft, by_scores), dim=-1).to(head.dtype)
        dense.scatter_add_(-1, torch.cat((hard, soft_places, places), dim=-1), few)
        return dense @ head, None, None, None, None, None, None


class Loss:
    """The training loss, with the target's output head cut: frequent tokens, a batch's own and some random ones.

    Sizes are the same in every step: the CPU's matrix products are compiled anew for each size.
    """

    def __init__(
        self, embeddings: Tensor, head: Tensor, frequent: Tensor, decay: float, soft: float, others: int = 1024
    ) -> None:
        self.embeddings, self.scaled = embeddings, unit_scaled(embeddings)
        self.whole_head, self.frequent = head.to(torch.bfloat16), frequent
        self.decay, self.soft = decay, soft
        self.size = min(len(frequent) + others, len(embeddings))

    def cut(self, labels: Tensor) -> None:
        """Make `head`, `ids` and `place` (of an id among them, else -1) for a batch's labels, at most `others` new."""
        vocabulary = len(self.embeddings)
        rank = torch.rand(vocabulary)
        rank[labels[labels >= 0]] = 2.0
        rank[self.frequent] = 3.0
        self.ids = rank.topk(self.size).indices.sort().values
        self.head = self.whole_head[self.ids]
        self.place = torch.full((vocabulary,), -1)
        self.place[self.ids] = torch.arange(len(self.ids))

    def __call__(self, drafter: Drafter, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The mean loss over all slots with a label, and figures for the progress bar."""
        self.cut(batch.labels)
        embedded = self.embeddings[block_ids(batch.anchor_ids, drafter)].float()
        embedded = embedded[:, :, : 1 + batch.labels.shape[-1]]
        hidden = drafter(batch.taps, embedded, batch.anchors)[:, :, 1:]
        slot = torch.arange(batch.labels.shape[-1]).expand_as(batch.labels).flatten()
        hidden, labels, soft_ids = hidden.flatten(0, 2), batch.labels.flatten(), batch.soft_ids.flatten(0, 2)
        label_places = torch.where(labels >= 0, self.place[labels.clamp(min=0)], -1)
        valid = label_places >= 0
        weight = torch.exp(-slot / self.decay) * valid
        weight = weight / weight.sum()
        soft_places = self.place[soft_ids]
        soft = self.soft * batch.soft_chances.flatten(0, 2) * (soft_places >= 0)
        each, scores, top = HeadLoss.apply(
            hidden.to(torch.bfloat16),
            self.head,
            label_places.clamp(min=0)[:, None],
            soft,
            soft_places.clamp(min=0),
            drafter.shape.selector_top,
        )
        loss = (each * weight).sum()
        candidates = self.ids[top]
        is_label = candidates == labels[:, None]
        figures = {"loss": loss.item(), "slot1": is_label[valid & (slot == 0), 0].float().mean().item()}
        if not drafter.shape.is_dflash2:
            return loss, figures

        previous = torch.cat((batch.anchor_ids[..., None], batch.labels[..., :-1].clamp(min=0)), dim=-1).flatten()
        scores = scores + drafter.candidate_selector(hidden, previous, candidates, self.scaled)
        goal = (soft[:, None, :] * (candidates[:, :, None] == soft_ids[:, None, :])).sum(-1)
        goal = goal + (1 - soft.sum(-1, keepdim=True)) * is_label
        picked = -(goal * scores.log_softmax(-1)).sum(-1)
        picked_loss = (picked * weight).sum()
        right = is_label.gather(-1, scores.argmax(-1, keepdim=True))
        figures |= {"selector": picked_loss.item(), "picked": right[valid].float().mean().item()}
        return loss + picked_loss, figures


def start_from_drafter(drafter: Drafter, state: dict[str, Any]) -> None:
    """Load the weights of a best.pt or state.pt; a DFlash one may start a DFlash 2, whose own parts stay fresh."""
    missing, unexpected = drafter.load_state_dict(state["drafter"], strict=False)
    if unexpected or any(not is_fresh(name) for name in missing):
        raise ValueError(f"--warm has other tensors than this drafter: {[*missing, *unexpected][:4]}.")


def is_fresh(name: str) -> bool:
    """Whether a parameter is one of those that DFlash 2 adds, which start from nothing."""
    return any(part in name for part in ("candidate_selector", "conv"))


def make_optimizer(drafter: Drafter, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, and a higher rate for what starts from nothing."""
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in drafter.named_parameters():
        key = (is_fresh(name), parameter.dim() == 2 and "rows" not in name)
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": group, "scale": 2.0 if fresh else 1.0, "weight_decay": decay if decays else 0.0}
            for (fresh, decays), group in groups.items()
        ],
        lr=rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def schedule(step: int, steps: int, warmup: int, cooldown: float) -> float:
    """Factor of the learning rate: linear warm-up, 1, then down to 0 by 1 - sqrt over the last share `cooldown`."""
    if step < warmup:
        return (step + 1) / warmup
    first = steps * (1 - cooldown)
    return 1.0 if step < first else 1 - math.sqrt((step - first) / (steps - first))


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """Run the training; returns the best held-out acceptance lengths by kind."""
    torch.manual_seed(arguments.seed)
    target = load_target(arguments.target).to(arguments.device)
    embeddings = target.get_input_embeddings().weight.detach().clone()
    head = target.get_output_embeddings().weight.detach().clone()
    rank = arguments.selector_rank if arguments.method == "dflash2" else 0
    shape = shape_for(target, tuple(arguments.taps), arguments.layers, arguments.block_size, arguments.mask, rank)
    slots = shape.block_size - 1
    data = Data(arguments.tokens)
    held_out = [s for s in load_sequences([arguments.held_out]) if s.temperature == 0][: arguments.held_out_sequences]
    frequent = frequent_tokens(data.sequences, shape.vocabulary, arguments.head_tokens)
    print(f"train: {len(held_out)} sequences held out, output head cut to {len(frequent)} tokens", flush=True)
    drafter = Drafter(shape, arguments.dropout)
    loss_of = Loss(embeddings, head, frequent, arguments.decay, arguments.soft)
    seen = frequent_tokens(data.sequences + held_out, shape.vocabulary, shape.vocabulary)
    replay = Replay(embeddings, head, seen)
    if arguments.start == "target":
        start_from_target(drafter, target)
        if not hasattr(target.model.layers[0].self_attn, "q_norm"):
            some = next(batches(data.sequences, 4, 8, slots, np.random.default_rng(0))).to(embeddings.device)
            fit_head_norms(drafter, some.taps.float(), embeddings[block_ids(some.anchor_ids, drafter)].float())
    del target
    optimizer = make_optimizer(drafter, arguments.rate, arguments.weight_decay)
    out: Path = arguments.out or TRAINING / arguments.method
    out.mkdir(parents=True, exist_ok=True)
    average = copy.deepcopy(drafter).eval().requires_grad_(False)
    step, best, seconds = 0, {"all": 0.0}, 0.0
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt", map_location=arguments.device, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        step, best, seconds = state["step"], state["best"], state["seconds"]
        print(f"train: going on at step {step}", flush=True)
    elif arguments.warm is not None:
        start_from_drafter(drafter, torch.load(arguments.warm, map_location=arguments.device, weights_only=True))
        average.load_state_dict(drafter.state_dict())

    def feed_from(step: int) -> Iterator[Batch]:
        rng = np.random.default_rng([arguments.seed, step])
        return batches(data.sequences, arguments.sequences, arguments.blocks, slots, rng, arguments.short_blocks)

    feed = feed_from(step)
    mean: dict[str, float] = {}
    with tqdm(initial=step, total=arguments.steps, desc="train", unit="step", mininterval=2) as bar:
        while step < arguments.steps:
            began = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = arguments.rate * group["scale"] * schedule(
                    step, arguments.steps, arguments.warmup, arguments.cooldown
                )
            with torch.autocast(arguments.device, torch.bfloat16):
                loss, figures = loss_of(drafter, next(feed).to(embeddings.device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % AVERAGE_EVERY == 0:
                move = max(1 / (1 + step / AVERAGE_EVERY), AVERAGE_EVERY / arguments.average)
                torch._foreach_lerp_(list(average.parameters()), list(drafter.parameters()), move)
            seconds += time.monotonic() - began
            mean = {key: value + 0.98 * (mean.get(key, value) - value) for key, value in figures.items()}
            bar.update(1)
            bar.set_postfix({key: f"{value:.3f}" for key, value in mean.items()}, refresh=False)
            if step % arguments.evaluate_every == 0 or step == arguments.steps:
                lengths = replay.acceptance_length(average, held_out)
                record = {"step": step, "seconds": round(seconds), **mean, "acceptance": lengths}
                tqdm.write(json.dumps(record))
                with (out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
                if lengths["all"] > best["all"]:
                    best = lengths
                    kept = {"drafter": average.state_dict(), "shape": shape.as_dict(), "record": record}
                    torch.save(kept, out / "best.pt")
                state = {"drafter": drafter.state_dict(), "average": average.state_dict(), "step": step}
                state |= {"optimizer": optimizer.state_dict(), "best": best, "seconds": seconds}
                torch.save(state, out / "state.partial.pt")
                (out / "state.partial.pt").rename(out / "state.pt")
                if data.refresh():
                    feed = feed_from(step)
    return best


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--tokens", type=Path, nargs="+", default=[TRAINING / "prompts"], help="folders of shards")
    parser.add_argument("--held-out", type=Path, default=TRAINING / "held-out", help="shards for early stopping")
    parser.add_argument("--out", type=Path, help="folder (default .demo/training/METHOD)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", choices=("dflash2", "dflash"), default="dflash2")
    parser.add_argument("--start", choices=("target", "random"), default="target", help="where the layers start from")
    parser.add_argument("--warm", type=Path, help="start from this best.pt or state.pt (DFlash may start DFlash 2)")
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
    parser.add_argument("--cooldown", type=float, default=0.3, help="share of the steps in which the rate falls to 0")
    parser.add_argument("--average", type=int, default=200, help="steps that the moving average of weights spans")
    parser.add_argument("--short-blocks", type=float, default=0.5, help="share of batches with half as many slots")
    parser.add_argument("--head-tokens", type=int, default=8192, help="most frequent tokens in the output head")
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
