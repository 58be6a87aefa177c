# SPDX-License-Identifier: Apache-2.0
"""Which tensors a draft needs, under which names and in which shapes, and whether a checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_dflash.checkpoint.config import DraftConfig
from vllm_dflash.checkpoint.errors import CheckpointError, Finding
from vllm_dflash.checkpoint.safetensors_header import TensorInfo

Shapes = dict[str, tuple[int, ...]]

# Older and renamed exports, as substrings of a tensor's name.
ALIASES = {
    "midlayer.": "layers.0.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "encoder.fc.": "fc.",
}
_PLAIN = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_PACKED = ("scale", "scales", "scale_inv", "zero_point", "qweight", "qzeros", "weight_packed")
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def canonical_name(name: str) -> str:
    """`name` with the aliases of older and renamed checkpoints resolved."""
    for alias, replacement in ALIASES.items():
        name = name.replace(alias, replacement)
    return name


def canonical_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """`tensors` under their canonical names. Raises CheckpointError if two names mean the same tensor."""
    named: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        canonical = canonical_name(name)
        if canonical in named:
            raise CheckpointError("bad_weights", f"The checkpoint has {canonical} twice, once as {name}.")
        named[canonical] = info
    return named


def required_tensors(
    config: DraftConfig, *, target_hidden_size: int | None = None, vocab_size: int | None = None
) -> Shapes:
    """Name to shape of every tensor the draft cannot do without.

    `target_hidden_size` and `vocab_size` are the target's; the config's own stand in where they are None.
    Source: published checkpoints of arXiv 2602.06036 and the DFlash 2 announcement.
    """
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    target_hidden = target_hidden_size or config.target_hidden_size or hidden
    vocab = config.vocab_size or vocab_size
    shapes: Shapes = {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if config.use_aux_hidden_state:
        shapes["fc.weight"] = (hidden, config.num_taps * target_hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        attention = prefix + "self_attn."
        projections = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        projections["o_proj"] = (hidden, queries)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"{attention}{name}.weight"] = shape
            if config.attention_bias:
                shapes[f"{attention}{name}.bias"] = shape[:1]
        shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (head_dim,)
        if config.attention_sink_bias:
            shapes[attention + "attention_sink_bias"] = (config.num_attention_heads,)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (mlp, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, mlp)
        if config.is_dflash2:
            taps = config.conv_kernel_size or 0
            for convolution in ("attention_conv.", "mlp_conv."):
                shapes[prefix + convolution + "base_kernel"] = (2, taps, hidden)
                kernels = 2 * taps * config.conv_groups
                shapes[prefix + convolution + "kernel_projection.weight"] = (kernels, hidden)
    if config.is_dflash2:
        rank = config.selector_rank or 0
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        if vocab:
            shapes["candidate_selector.predecessor_codebook"] = (vocab, rank)
            shapes["candidate_selector.successor_codebook"] = (vocab, rank)
    head_rows = config.draft_vocab_size or vocab
    if config.needs_own_lm_head and head_rows:
        shapes["lm_head.weight"] = (head_rows, hidden)
    if config.reduced_vocabulary and config.draft_vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def optional_tensors(config: DraftConfig, *, vocab_size: int | None = None) -> Shapes:
    """Name to shape of the tensors a draft may bring besides; t2d is there to be ignored."""
    vocab = config.vocab_size or vocab_size
    if not vocab:
        return {}
    head_rows = config.draft_vocab_size or vocab
    return {
        "embed_tokens.weight": (vocab, config.hidden_size),
        "lm_head.weight": (head_rows, config.hidden_size),
        "d2t": (head_rows,),
        "t2d": (vocab,),
    }


def check_tensors(
    config: DraftConfig,
    tensors: Mapping[str, TensorInfo],
    *,
    target_hidden_size: int | None = None,
    vocab_size: int | None = None,
) -> list[Finding]:
    """What a checkpoint's tensors (by name, aliases allowed) lack, have too much, or have in a wrong shape.

    A quantised checkpoint packs its matrices in its own way: of those only the presence is checked, and the
    shape where the dtype shows that nothing is packed. An empty list means that the weights will load.
    """
    try:
        named = canonical_tensors(tensors)
    except CheckpointError as error:
        return [error.finding]
    foreign = _foreign(config, named)
    if foreign:
        return foreign
    required = required_tensors(config, target_hidden_size=target_hidden_size, vocab_size=vocab_size)
    allowed = optional_tensors(config, vocab_size=vocab_size) | required
    quantised = config.quant_method is not None or any(name.endswith(_PACKED) for name in named)
    missing = [name for name in required if name not in named and not _told_apart(name)]
    unexpected = [name for name in named if name not in allowed and not _told_apart(name)]
    if quantised:
        modules = {name.rpartition(".")[0] for name in named}
        missing = [name for name in missing if not _packed(name, required[name], modules)]
        unexpected = [name for name in unexpected if not _part_of_packed(name, allowed)]
    findings = _vocabulary(config, named)
    if missing and unexpected and all(name.startswith("model.") for name in named):
        return [
            *findings,
            Finding(
                "tensor_names",
                "error",
                f"The checkpoint's tensor names begin with 'model.', such as {_some(named)}.",
                "A draft's names have no such prefix (fc.weight, layers.0.…).",
                "Export the checkpoint without the prefix.",
            ),
        ]
    if missing:
        findings.append(
            Finding(
                "missing_tensors",
                "error",
                f"The checkpoint lacks {_counted(missing)}: {_some(missing)}.",
                f"config.json describes a {config.architecture} with {config.num_hidden_layers} layers.",
                "Download the checkpoint again, or take config.json and weights from the same revision.",
            )
        )
    if unexpected:
        findings.append(
            Finding(
                "unexpected_tensors",
                "warning" if quantised else "error",
                f"The checkpoint has {_counted(unexpected)} that a {config.architecture} of this config.json "
                f"does not have: {_some(unexpected)}.",
                "What they were trained to do would be left out.",
                "Take config.json and weights from the same revision.",
            )
        )
    return findings + _shapes(config, named, allowed, quantised, target_hidden_size) + _dtypes(config, named, allowed)


def _foreign(config: DraftConfig, named: Mapping[str, TensorInfo]) -> list[Finding]:
    """Tensors that show another network than config.json names."""
    if any("mask_hidden" in name for name in named):
        return [
            Finding(
                "mask_hidden",
                "error",
                "The checkpoint has a tensor mask_hidden.",
                "A DFlash draft embeds its mask slots as mask_token_id; mask_hidden is another method's.",
                "Use a DFlash checkpoint, or put a trained mask embedding beside it as mask_embedding.pt.",
            )
        ]
    extra = [name for name in named if "candidate_selector." in name or "_conv." in name]
    if extra and not config.is_dflash2:
        return [
            Finding(
                "dflash2_tensors",
                "error",
                f"The checkpoint has DFlash 2 tensors, such as {_some(extra)}, but config.json names the "
                f"architecture {config.declared_architecture}.",
                "Served as DFlash it would draft without its convolution and selector.",
                'Set "architectures": ["DFlash2DraftModel"] and its keys in dflash_config.',
            )
        ]
    return []


def _vocabulary(config: DraftConfig, named: Mapping[str, TensorInfo]) -> list[Finding]:
    """A reduced vocabulary needs a head and a map of its own."""
    findings = []
    size, full = config.draft_vocab_size, config.vocab_size or "the target's"
    if config.reduced_vocabulary and "d2t" not in named:
        findings.append(
            Finding(
                "no_d2t",
                "error",
                f"draft_vocab_size is {size} and vocab_size {full}, but the checkpoint has no d2t.",
                "Without that map a drafted id cannot be turned into the target's.",
                "Use a checkpoint with d2t, or remove draft_vocab_size if the head is full.",
            )
        )
    if config.needs_own_lm_head and not any(name.startswith("lm_head.") for name in named):
        reason = (
            f"draft_vocab_size is {size} and vocab_size {full}"
            if config.reduced_vocabulary
            else "config.json says has_own_lm_head true"
        )
        findings.append(
            Finding(
                "no_lm_head",
                "error",
                f"{reason}, but the checkpoint has no lm_head.weight.",
                "The target's head would give logits of other tokens.",
                "Use a checkpoint with its own lm_head, or correct config.json.",
            )
        )
    d2t = named.get("d2t")
    if d2t is not None and d2t.dtype != "I64":
        findings.append(Finding("d2t_dtype", "error", f"d2t is stored as {d2t.dtype}; it holds ids and must be I64."))
    return findings


def _shapes(
    config: DraftConfig,
    named: Mapping[str, TensorInfo],
    allowed: Shapes,
    quantised: bool,
    target_hidden_size: int | None,
) -> list[Finding]:
    """Tensors whose shape is not the one config.json (and the target) asks for."""
    wrong = []
    for name, shape in allowed.items():
        info = named.get(name)
        if info is None or info.shape == shape or name == "t2d":
            continue
        if quantised and info.dtype not in _PLAIN + _FP8:
            continue
        if name == "fc.weight" and info.shape[:1] == shape[:1] and len(info.shape) == 2:
            taps = config.num_taps
            width = target_hidden_size or config.target_hidden_size or config.hidden_size
            return [
                Finding(
                    "fc_width",
                    "error",
                    f"fc.weight takes {info.shape[1]} features, but {taps} taps of a target of hidden size "
                    f"{width} give {taps * width}.",
                    "The draft was trained for another target, or with other taps.",
                    "Use the draft that was trained for this target.",
                )
            ]
        wrong.append(f"{name} is {list(info.shape)} and should be {list(shape)}")
    if not wrong:
        return []
    return [
        Finding(
            "tensor_shapes",
            "error",
            f"{_counted(wrong)} of the checkpoint {'has' if len(wrong) == 1 else 'have'} another shape than "
            f"config.json describes: {_some(wrong, '; ')}.",
            fix="Take config.json and weights from the same revision.",
        )
    ]


def _dtypes(config: DraftConfig, named: Mapping[str, TensorInfo], allowed: Shapes) -> list[Finding]:
    """Weights in a storage type that says quantised, in a checkpoint that does not."""
    odd = [name for name, info in named.items() if name in allowed and info.dtype not in _PLAIN]
    odd = [name for name in odd if name not in ("d2t", "t2d")]
    if not odd or config.quant_method:
        return []
    return [
        Finding(
            "no_quantization_config",
            "warning",
            f"{odd[0]} is stored as {named[odd[0]].dtype}, but config.json has no quantization_config.",
            "The numbers are read as they are, without any scale.",
            "If the checkpoint is quantised, take config.json from the same revision.",
        )
    ]


def _told_apart(name: str) -> bool:
    """Names that _vocabulary speaks about in its own words, or that mean nothing to anyone."""
    return name in ("d2t", "t2d") or name.startswith("lm_head.") or name.endswith("rotary_emb.inv_freq")


def _packed(name: str, shape: tuple[int, ...], modules: set[str]) -> bool:
    """Whether the matrix `name` is there in some packed form, on its own or fused with its siblings."""
    module = name.rpartition(".")[0]
    parent, _, leaf = module.rpartition(".")
    return len(shape) == 2 and (module in modules or f"{parent}.{_FUSED.get(leaf, leaf)}" in modules)


def _part_of_packed(name: str, allowed: Shapes) -> bool:
    """Whether `name` is a scale, zero point or packed form of a matrix that the draft has."""
    module = name.rpartition(".")[0]
    projection = module.rpartition(".")[2]
    attention = module.endswith(("self_attn", "self_attn.attn")) and name.endswith("_scale")
    return f"{module}.weight" in allowed or projection in _FUSED.values() or attention


def _counted(items: list[str]) -> str:
    return "1 tensor" if len(items) == 1 else f"{len(items)} tensors"


def _some(items: Iterable[str], separator: str = ", ") -> str:
    listed = list(items)
    return separator.join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
