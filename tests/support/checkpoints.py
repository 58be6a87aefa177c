# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints on disk: targets (Qwen3, Llama) and drafters of both architectures, seeded.

Sizes are small enough for hundreds of forwards a second on one core. Weights are random but scaled so that
logits are well separated (their standard deviation is some units, not the 0.02 of an initialiser): otherwise
near-ties, and not the code under test, would decide which token wins.
"""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.tokenizers import BOS_ID, EOS_ID, PAD_ID, save_tokenizer

Dialect = Literal["z-lab", "speculators"]


@dataclass(frozen=True)
class TargetShape:
    """A tiny target. `logit_std` is the standard deviation its logits are scaled to.

    `mixing` scales what attention and MLP add to the residual stream: near 0 the next token hangs on the
    current one only, which a drafter can learn in seconds; at 1 it hangs on everything.
    """

    family: Literal["qwen3", "llama", "qwen3_next"] = "qwen3"
    vocab_size: int = 128
    hidden_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 128
    tie_embeddings: bool = False
    max_positions: int = 1024
    logit_std: float = 2.5
    mixing: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class DrafterShape:
    """A tiny drafter. `None` leaves the key out of config.json, so that the reader's default is tested."""

    architecture: Literal["dflash", "dflash2"] = "dflash"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 96
    target_layer_ids: tuple[int, ...] = (0, 1, 3)
    block_size: int | None = 8
    mask_token_id: int = PAD_ID
    max_positions: int = 1024
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = 10_000.0
    is_neox_style: bool | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    use_swa: bool | None = None
    swa_window_size: int | None = None
    attention_value_scale: float | None = None
    attention_sink_bias: bool | None = None
    attention_bias: bool = False
    logit_scale: float | None = None
    draft_vocab_size: int | None = None
    own_lm_head: bool = False
    own_embedding: bool = False
    mask_embedding: Literal["tensor", "dict"] | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 16
    selector_top_k: int = 8
    dialect: Dialect = "z-lab"
    seed: int = 1

    @property
    def num_speculative_tokens(self) -> int:
        """K = B - 1, with the default block size of the dialect where the shape names none."""
        return (self.block_size or {"z-lab": 16, "speculators": 8}[self.dialect]) - 1


@dataclass(frozen=True)
class Pair:
    """A target and a drafter on disk, with the shapes they were made from."""

    target: Path
    drafter: Path
    target_shape: TargetShape = field(repr=False)
    drafter_shape: DrafterShape = field(repr=False)


# Every fourth layer of qwen3_next has attention, the others a state.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            # vLLM looks for one layer of experts at least: the last.
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "decoder_sparse_step": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}


def target_config(shape: TargetShape) -> Qwen3Config | LlamaConfig | Qwen3NextConfig:
    config_class, _, more = FAMILIES[shape.family]
    return config_class(
        **more,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )


def make_target(directory: Path, shape: TargetShape = TargetShape()) -> Path:
    """Writes a random target with its tokenizer and returns its directory."""
    generator = torch.Generator().manual_seed(shape.seed)
    config = target_config(shape)
    _, model_class, _ = FAMILIES[shape.family]
    with torch.random.fork_rng():
        torch.manual_seed(shape.seed)
        model: PreTrainedModel = model_class(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(shape.mixing)
        sample = torch.randint(0, shape.vocab_size, (4, 32), generator=generator)
        spread = model(sample).logits.std()
        # Zero-centred where the target has states, so there the head is scaled.
        final = model.get_parameter("lm_head.weight" if shape.family == "qwen3_next" else "model.norm.weight")
        final.mul_(shape.logit_std / spread)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    save_tokenizer(directory, shape.vocab_size)
    return directory


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith(("A_log", "dt_bias")):
        return
    if name.endswith("norm.weight"):
        weight.copy_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
        return
    gain = 1.0 if "embed_tokens" in name else 1.4 * weight.shape[-1] ** -0.5
    weight.copy_(gain * torch.randn(weight.shape, generator=generator))


def drafter_config(shape: DrafterShape, target: TargetShape) -> dict[str, Any]:
    """config.json of a drafter, in the dialect the shape asks for."""
    layer_keys: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": shape.attention_bias,
        "tie_word_embeddings": False,
        "layer_types": _listed(shape.layer_types),
        "sliding_window": shape.sliding_window,
        "is_causal": shape.is_causal,
        "is_neox_style": shape.is_neox_style,
        "logit_scale": shape.logit_scale,
    }
    if shape.sliding_window is not None:
        layer_keys["use_sliding_window"] = True
    if shape.rope_theta is not None:
        layer_keys["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.hidden_size != target.hidden_size:
        layer_keys["target_hidden_size"] = target.hidden_size
    draft_keys: dict[str, Any] = {
        "causal": shape.causal,
        "use_swa": shape.use_swa,
        "swa_window_size": shape.swa_window_size,
        "attention_value_scale": shape.attention_value_scale,
        "attention_sink_bias": shape.attention_sink_bias,
    }
    selector_keys: dict[str, Any] = {
        "conv_kernel_size": shape.conv_kernel_size,
        "conv_group_size": shape.conv_group_size,
        "selector_rank": shape.selector_rank,
        "selector_top_k": shape.selector_top_k,
    }
    scale_keys: dict[str, Any] = {
        "input_embedding_scale": shape.input_embedding_scale,
        "output_multiplier": shape.output_multiplier,
        "final_logit_softcapping": shape.final_logit_softcapping,
    }
    second = shape.architecture == "dflash2"
    if shape.dialect == "z-lab":
        return _present(
            layer_keys,
            architectures=["DFlash2DraftModel" if second else "DFlashDraftModel"],
            dtype="float32",
            num_target_layers=target.num_layers,
            draft_vocab_size=shape.draft_vocab_size,
            block_size=shape.block_size,
            dflash_config=_present(
                draft_keys,
                mask_token_id=shape.mask_token_id,
                target_layer_ids=list(shape.target_layer_ids),
                **(selector_keys | scale_keys if second else {}),
            ),
        )
    return _present(
        selector_keys | scale_keys if second else {},
        architectures=["DFlash2Speculator" if second else "DFlashSpeculator"],
        speculators_model_type=shape.architecture,
        dtype="float32",
        transformer_layer_config=_present(layer_keys),
        aux_hidden_state_layer_ids=[layer + 1 for layer in shape.target_layer_ids],
        mask_token_id=shape.mask_token_id,
        block_size=shape.block_size,
        draft_vocab_size=shape.draft_vocab_size or target.vocab_size,
        sliding_window_non_causal=None if shape.causal is None else not shape.causal,
        speculators_config={
            "algorithm": shape.architecture,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.num_speculative_tokens}],
            "verifier": {"name_or_path": "", "architectures": []},
        },
    )


def _present(keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {key: value for key, value in (keys | more).items() if value is not None}


def _listed(values: tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else list(values)


def drafter_weights(shape: DrafterShape, target: TargetShape) -> dict[str, torch.Tensor]:
    """Random tensors of a drafter, fp32, under the names a checkpoint uses."""
    generator = torch.Generator().manual_seed(shape.seed)
    hidden, head_dim = shape.hidden_size, shape.head_dim
    query, key_value = shape.num_heads * head_dim, shape.num_kv_heads * head_dim

    def normal(*size: int, gain: float) -> torch.Tensor:
        return gain * torch.randn(size, generator=generator)

    def linear(rows: int, columns: int, gain: float = 1.2) -> torch.Tensor:
        return normal(rows, columns, gain=gain * columns**-0.5)

    def norm(size: int) -> torch.Tensor:
        return 1 + normal(size, gain=0.2)

    weights = {
        "fc.weight": linear(hidden, len(shape.target_layer_ids) * target.hidden_size),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for index in range(shape.num_layers):
        layer = f"layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            f"{attention}.q_proj.weight": linear(query, hidden),
            f"{attention}.k_proj.weight": linear(key_value, hidden),
            f"{attention}.v_proj.weight": linear(key_value, hidden),
            f"{attention}.o_proj.weight": linear(hidden, query, gain=2.0),
            f"{attention}.q_norm.weight": 1.5 * norm(head_dim),
            f"{attention}.k_norm.weight": norm(head_dim),
            f"{mlp}.gate_proj.weight": linear(shape.intermediate_size, hidden),
            f"{mlp}.up_proj.weight": linear(shape.intermediate_size, hidden),
            f"{mlp}.down_proj.weight": linear(hidden, shape.intermediate_size),
        }
        if shape.attention_bias:
            for name, size in (("q", query), ("k", key_value), ("v", key_value), ("o", hidden)):
                weights[f"{attention}.{name}_proj.bias"] = normal(size, gain=0.3)
        if shape.attention_sink_bias:
            weights[f"{attention}.attention_sink_bias"] = normal(shape.num_heads, gain=1.0)
        if shape.architecture == "dflash2":
            taps, groups = shape.conv_kernel_size, hidden // shape.conv_group_size
            identity = torch.zeros(2, taps, hidden)
            identity[:, 0] = 1
            for name in ("attention_conv", "mlp_conv"):
                weights[f"{layer}.{name}.base_kernel"] = identity + normal(2, taps, hidden, gain=0.4)
                weights[f"{layer}.{name}.kernel_projection.weight"] = linear(2 * taps * groups, hidden, gain=0.4)
    if shape.architecture == "dflash2":
        rank, vocabulary = shape.selector_rank, target.vocab_size
        weights |= {
            "candidate_selector.predecessor_codebook": normal(vocabulary, rank, gain=1.0),
            "candidate_selector.successor_codebook": normal(vocabulary, rank, gain=1.0),
            "candidate_selector.hidden_projection.weight": linear(rank, hidden, gain=1.0),
        }
    if shape.own_embedding:
        weights["embed_tokens.weight"] = normal(target.vocab_size, hidden, gain=1.0)
    if shape.own_lm_head or shape.draft_vocab_size is not None:
        weights["lm_head.weight"] = linear(shape.draft_vocab_size or target.vocab_size, hidden, gain=2.0)
    if shape.draft_vocab_size is not None:
        chosen = torch.randperm(target.vocab_size, generator=generator)[: shape.draft_vocab_size]
        chosen = chosen.sort().values
        weights["d2t"] = chosen - torch.arange(shape.draft_vocab_size)
        weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return weights


def write_drafter(
    directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], shape: DrafterShape
) -> Path:
    """Writes config.json, model.safetensors and, where the shape asks, mask_embedding.pt."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: weight.detach().contiguous() for name, weight in weights.items()},
        directory / "model.safetensors",
    )
    if shape.mask_embedding is not None:
        generator = torch.Generator().manual_seed(shape.seed + 1)
        row = torch.randn(shape.hidden_size, generator=generator)
        state = row if shape.mask_embedding == "tensor" else {"embedding": row, "mask_token_id": shape.mask_token_id}
        torch.save(state, directory / "mask_embedding.pt")
    return directory


def make_drafter(directory: Path, shape: DrafterShape, target: TargetShape = TargetShape()) -> Path:
    """Writes a random drafter for `target` and returns its directory."""
    return write_drafter(directory, drafter_config(shape, target), drafter_weights(shape, target), shape)


def make_pair(directory: Path, drafter: DrafterShape, target: TargetShape = TargetShape()) -> Pair:
    return Pair(
        target=make_target(directory / "target", target),
        drafter=make_drafter(directory / "drafter", drafter, target),
        target_shape=target,
        drafter_shape=drafter,
    )


def with_one_k_norm(pair: Pair, directory: Path) -> Pair:
    """The pair with the first layer's k_norm in every draft layer, for a comparison with stock vLLM on a CPU.

    Stock norms the context keys of all layers in one call with one weight row a layer; its CPU kernel (0.32) reads
    the first row for all of them, on both runners.
    """
    if not directory.exists():
        shutil.copytree(pair.drafter, directory)
        weights = load_file(directory / "model.safetensors")
        norms = [name for name in weights if name.endswith("self_attn.k_norm.weight")]
        first = weights["layers.0.self_attn.k_norm.weight"]
        save_file(weights | {name: first.clone() for name in norms}, directory / "model.safetensors")
    return replace(pair, drafter=directory)
