# SPDX-License-Identifier: Apache-2.0
"""Pairs that cannot work, and pairs that work with a loss: a good pair on disk, changed in one way each."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import DrafterShape, Pair

Change = Callable[[Path], None]


DFLASH = DrafterShape(architecture="dflash")
DFLASH2 = DrafterShape(architecture="dflash2")


@dataclass(frozen=True)
class Case:
    """One change of a drafter's folder (or one argument), and the code of the one finding that it must give."""

    code: str
    shape: DrafterShape = DFLASH2
    change: Change = lambda folder: None
    serve: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def write(self, pair: Pair, folder: Path) -> Pair:
        """The pair with its drafter changed, in `folder`."""
        shutil.copytree(pair.drafter, folder)
        self.change(folder)
        return Pair(pair.target, folder, pair.target_shape, pair.drafter_shape)

    def __str__(self) -> str:
        return self.name or self.code


def config(**keys: Any) -> Change:
    """Top-level keys set, or with None removed."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text()) | keys
        raw = {key: value for key, value in raw.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def inner(**keys: Any) -> Change:
    """Keys of dflash_config set, or with None removed."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        nested = raw["dflash_config"] | keys
        raw["dflash_config"] = {key: value for key, value in nested.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def weights(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(edit(load_file(file)), file)

    return change


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def without(name: str) -> Change:
    return weights(lambda tensors: {key: value for key, value in tensors.items() if key != name})


def added(name: str, tensor: torch.Tensor) -> Change:
    return weights(lambda tensors: tensors | {name: tensor})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


REDUCED = DrafterShape(architecture="dflash", draft_vocab_size=64)
OTHER_MASK = {"embedding": torch.ones(64), "mask_token_id": 3}
ZEROS = torch.zeros(4)

BROKEN = (
    Case("foreign_layout", change=inner(sample_from_anchor=True)),
    Case("vocab_size", change=config(vocab_size=160)),
    Case("hidden_size", change=config(target_hidden_size=96)),
    Case("target_layer_ids", change=inner(target_layer_ids=[0, 1, 7])),
    Case("mask_token_id", change=both(inner(mask_token_id=5000), config(mask_token_id=None))),
    Case("bad_config", change=inner(target_layer_ids=[3, 1, 0]), name="taps in another order"),
    Case("bad_config", change=config(architectures=["DFlashDraftModel"]), name="DFlash 2 keys under DFlash"),
    Case("bad_config", change=inner(selector_rank=None), name="no selector_rank"),
    Case("bad_config", change=config(hidden_act="gelu"), name="gelu"),
    Case("no_window", change=config(layer_types=["sliding_attention"] * 2)),
    Case("bad_rope", change=config(rope_parameters={"rope_type": "unheard_of"}, rope_scaling=None)),
    Case("no_taps", DFLASH, inner(use_aux_hidden_state=False)),
    Case("dflash2_reduced_vocabulary", change=config(draft_vocab_size=64, has_own_lm_head=True)),
    Case("missing_tensors", change=without("layers.1.mlp.up_proj.weight")),
    Case("unexpected_tensors", change=added("layers.0.gate.weight", ZEROS)),
    Case("dflash2_tensors", DFLASH, added("candidate_selector.hidden_projection.weight", ZEROS)),
    Case("mask_hidden", change=added("mask_hidden", ZEROS)),
    Case("tensor_shapes", change=added("norm.weight", torch.ones(96))),
    Case("shared_width", DrafterShape(architecture="dflash", hidden_size=32)),
    Case("fc_width", change=added("fc.weight", torch.zeros(64, 128))),
    Case("tensor_names", change=weights(lambda tensors: {f"model.{name}": t for name, t in tensors.items()})),
    Case("no_lm_head", DFLASH, config(has_own_lm_head=True)),
    Case("no_d2t", REDUCED, without("d2t")),
    Case("d2t_dtype", REDUCED, added("d2t", torch.zeros(64, dtype=torch.int32))),
    Case("d2t_range", REDUCED, added("d2t", torch.full((64,), 100))),
    Case("pickle", change=pickled),
    Case("bad_weights", change=cut_short),
    Case("missing_file", change=lambda folder: (folder / "config.json").unlink()),
    Case("bad_json", change=lambda folder: (folder / "config.json").write_text("{")),
    Case(
        "mask_embedding",
        change=lambda folder: torch.save(OTHER_MASK, folder / "mask_embedding.pt"),
    ),
    Case("num_speculative_tokens", speculative={"num_speculative_tokens": 8}),
    Case("method", speculative={"method": "ngram", "num_speculative_tokens": 2}),
    Case(
        "configuration", serve={"max_num_batched_tokens": 4, "max_num_seqs": 4}, name="fewer tokens a step than drafts"
    ),
    Case("target", serve={"max_model_len": 5000}, name="longer than the target"),
)

LOSSY = (
    Case("num_target_layers", change=config(num_target_layers=6)),
    Case("max_position_embeddings", DrafterShape(architecture="dflash2", max_positions=64)),
    Case("partial_rotary_factor", change=config(partial_rotary_factor=0.5)),
    Case("logit_scale", change=config(logit_scale=2.0)),
    Case(
        "no_quantization_config",
        change=weights(lambda tensors: tensors | {"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}),
    ),
    Case("unknown_keys", change=inner(another_head=3)),
    Case("batched_tokens", serve={"max_num_seqs": 64, "max_num_batched_tokens": 256}),
)

SLIDING, FULL = "sliding_attention", "full_attention"
GOOD = {
    "DFlash": DFLASH,
    "DFlash 2": DrafterShape(architecture="dflash2"),
    "speculators": DrafterShape(architecture="dflash", dialect="speculators", draft_vocab_size=64),
    "speculators 2": DrafterShape(architecture="dflash2", dialect="speculators"),
    "reduced vocabulary": REDUCED,
    "mixed windows": DrafterShape(
        architecture="dflash2", layer_types=(SLIDING, FULL), sliding_window=32, is_causal=False
    ),
    "own embedding and head": DrafterShape(architecture="dflash2", own_lm_head=True, own_embedding=True),
    "causal": DrafterShape(architecture="dflash", is_causal=True),
}
