# SPDX-License-Identifier: Apache-2.0
"""Which tensors a draft needs, and what is said of a checkpoint that has others."""

import math
from typing import Any

import pytest

from tests.checkpoint.published import PUBLISHED, Published
from tests.checkpoint.samples import data, nested, speculators, zlab, zlab2
from vllm_dflash.checkpoint import Finding, TensorInfo, check_tensors, parse_config, required_tensors

MUSE = data("dflash2-muse-glimmer-30b.shapes.json")


def infos(shapes: dict[str, Any], dtype: str = "BF16", **dtypes: str) -> dict[str, TensorInfo]:
    return {name: TensorInfo(dtypes.get(name, dtype), tuple(shape)) for name, shape in shapes.items()}


def needed(raw: dict[str, Any], **changes: tuple[int, ...] | None) -> dict[str, TensorInfo]:
    """Headers of all tensors that `raw` needs; a change of None leaves one out."""
    shapes = required_tensors(parse_config(raw)) | changes
    tensors = infos({name: shape for name, shape in shapes.items() if shape is not None})
    return tensors | {name: TensorInfo("I64", tensors[name].shape) for name in tensors if name == "d2t"}


def only(findings: list[Finding], code: str, severity: str = "error") -> str:
    assert [(finding.code, finding.severity) for finding in findings] == [(code, severity)]
    return str(findings[0])


def test_muse_glimmer_dflash2_has_exactly_these_tensors() -> None:
    config = parse_config(data("dflash2-muse-glimmer-30b.config.json"))
    assert required_tensors(config) == {name: tuple(shape) for name, shape in MUSE["shapes"].items()}
    assert check_tensors(config, infos(MUSE["shapes"]), target_hidden_size=6656, vocab_size=202048) == []


def test_muse_glimmer_assistant_has_these_tensors_under_other_names() -> None:
    config = parse_config(data("dflash1-muse-glimmer-30b-assistant.config.json"))
    added = ("candidate_selector.", "_conv.")
    shapes = {name: shape for name, shape in MUSE["shapes"].items() if not any(a in name for a in added)}
    assert required_tensors(config) == {name: tuple(shape) for name, shape in shapes.items()}
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    shapes = {renamed.get(name, name): shape for name, shape in shapes.items()}
    assert check_tensors(config, infos(shapes), target_hidden_size=6656, vocab_size=202048) == []


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.draft)
def test_published_shapes(published: Published) -> None:
    config = parse_config(published.raw())
    shapes = required_tensors(config)
    heads, kv_heads, head_dim = published.heads
    hidden, last = published.hidden, published.layers - 1
    assert shapes["fc.weight"] == (hidden, hidden * len(published.taps))
    assert shapes[f"layers.{last}.self_attn.q_proj.weight"] == (heads * head_dim, hidden)
    assert shapes[f"layers.{last}.self_attn.v_proj.weight"] == (kv_heads * head_dim, hidden)
    assert shapes[f"layers.{last}.mlp.down_proj.weight"] == (hidden, published.mlp)
    assert f"layers.{last + 1}.input_layernorm.weight" not in shapes
    assert len(shapes) == 3 + 11 * published.layers + (4 * published.layers + 3 if config.is_dflash2 else 0)
    assert check_tensors(config, infos(shapes), target_hidden_size=hidden) == []


def test_qwen38_draft_weighs_what_is_reported() -> None:
    config = parse_config(next(p for p in PUBLISHED if p.draft.startswith("z-lab/Qwen3.8")).raw())
    shapes = required_tensors(config)
    assert len(shapes) == 81
    assert round(2 * sum(math.prod(shape) for shape in shapes.values()) / 1e9, 2) == 3.85


@pytest.mark.parametrize("make", [zlab, zlab2, speculators])
def test_a_whole_checkpoint_has_no_findings(make: Any) -> None:
    assert check_tensors(parse_config(make()), needed(make())) == []


def test_optional_tensors_are_allowed() -> None:
    more = {"embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64)}
    tensors = needed(zlab()) | infos(more)
    tensors["t2d"] = TensorInfo("BOOL", (999,))
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = TensorInfo("F32", (16,))
    assert check_tensors(parse_config(zlab()), tensors) == []


def test_biases_and_sinks_are_needed_where_the_config_says_so() -> None:
    raw = nested(zlab(attention_bias=True), attention_sink_bias=True)
    shapes = required_tensors(parse_config(raw))
    assert shapes["layers.1.self_attn.q_proj.bias"] == (128,)
    assert shapes["layers.1.self_attn.k_proj.bias"] == (64,)
    assert shapes["layers.1.self_attn.o_proj.bias"] == (64,)
    assert shapes["layers.1.self_attn.attention_sink_bias"] == (4,)
    assert check_tensors(parse_config(raw), needed(raw)) == []


def test_old_names_of_a_single_layer() -> None:
    raw = zlab(num_hidden_layers=1)
    tensors = {name.replace("layers.0.", "midlayer."): info for name, info in needed(raw).items()}
    assert any(name.startswith("midlayer.") for name in tensors)
    assert check_tensors(parse_config(raw), tensors) == []
    tensors["layers.0.input_layernorm.weight"] = TensorInfo("BF16", (64,))
    assert only(check_tensors(parse_config(raw), tensors), "bad_weights") == (
        "The checkpoint has layers.0.input_layernorm.weight twice, once as layers.0.input_layernorm.weight."
    )


def test_missing_tensors() -> None:
    tensors = needed(zlab(), **{"norm.weight": None})
    assert only(check_tensors(parse_config(zlab()), tensors), "missing_tensors") == (
        "The checkpoint lacks 1 tensor: norm.weight. config.json describes a DFlashDraftModel with 2 layers. "
        "Download the checkpoint again, or take config.json and weights from the same revision."
    )
    tensors = {name: info for name, info in needed(zlab()).items() if not name.startswith("layers.1.")}
    assert only(check_tensors(parse_config(zlab()), tensors), "missing_tensors") == (
        "The checkpoint lacks 11 tensors: layers.1.input_layernorm.weight, "
        "layers.1.post_attention_layernorm.weight, layers.1.self_attn.q_proj.weight and 8 more. config.json "
        "describes a DFlashDraftModel with 2 layers. Download the checkpoint again, or take config.json and "
        "weights from the same revision."
    )


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.mlp_conv.base_kernel",
        "layers.0.attention_conv.kernel_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.hidden_projection.weight",
    ],
)
def test_missing_dflash2_tensors(name: str) -> None:
    findings = check_tensors(parse_config(zlab2()), needed(zlab2(), **{name: None}))
    assert f"The checkpoint lacks 1 tensor: {name}." in only(findings, "missing_tensors")


def test_unexpected_tensors() -> None:
    tensors = needed(zlab()) | infos({"layers.2.input_layernorm.weight": (64,), "confidence_head.weight": (1, 64)})
    assert only(check_tensors(parse_config(zlab()), tensors), "unexpected_tensors") == (
        "The checkpoint has 2 tensors that a DFlashDraftModel of this config.json does not have: "
        "layers.2.input_layernorm.weight, confidence_head.weight. What they were trained to do would be left "
        "out. Take config.json and weights from the same revision."
    )


def test_misshapen_tensors() -> None:
    tensors = needed(zlab(), **{"layers.0.self_attn.q_proj.weight": (64, 64)})
    assert only(check_tensors(parse_config(zlab()), tensors), "tensor_shapes") == (
        "1 tensor of the checkpoint has another shape than config.json describes: "
        "layers.0.self_attn.q_proj.weight is [64, 64] and should be [128, 64]. Take config.json and weights "
        "from the same revision."
    )
    tensors["norm.weight"] = TensorInfo("BF16", (32,))
    assert only(check_tensors(parse_config(zlab()), tensors), "tensor_shapes") == (
        "2 tensors of the checkpoint have another shape than config.json describes: norm.weight is [32] and "
        "should be [64]; layers.0.self_attn.q_proj.weight is [64, 64] and should be [128, 64]. Take "
        "config.json and weights from the same revision."
    )


def test_fc_of_another_target() -> None:
    findings = check_tensors(parse_config(zlab()), needed(zlab()), target_hidden_size=128)
    assert only(findings, "fc_width") == (
        "fc.weight takes 192 features, but 3 taps of a target of hidden size 128 give 384. The draft was "
        "trained for another target, or with other taps. Use the draft that was trained for this target."
    )


def test_prefixed_names() -> None:
    tensors = {f"model.{name}": info for name, info in needed(zlab()).items()}
    assert only(check_tensors(parse_config(zlab()), tensors), "tensor_names") == (
        "The checkpoint's tensor names begin with 'model.', such as model.hidden_norm.weight, "
        "model.norm.weight, model.fc.weight and 22 more. A draft's names have no such prefix (fc.weight, "
        "layers.0.…). Export the checkpoint without the prefix."
    )


def test_mask_hidden() -> None:
    tensors = needed(zlab()) | infos({"mask_hidden": (64,)})
    assert only(check_tensors(parse_config(zlab()), tensors), "mask_hidden") == (
        "The checkpoint has a tensor mask_hidden. A DFlash draft embeds its mask slots as mask_token_id; "
        "mask_hidden is another method's. Use a DFlash checkpoint, or put a trained mask embedding beside it "
        "as mask_embedding.pt."
    )


def test_dflash2_tensors_under_the_name_of_dflash() -> None:
    assert only(check_tensors(parse_config(zlab()), needed(zlab2())), "dflash2_tensors") == (
        "The checkpoint has DFlash 2 tensors, such as layers.0.attention_conv.base_kernel, "
        "layers.0.attention_conv.kernel_projection.weight, layers.0.mlp_conv.base_kernel and 8 more, but "
        "config.json names the architecture DFlashDraftModel. Served as DFlash it would draft without its "
        'convolution and selector. Set "architectures": ["DFlash2DraftModel"] and its keys in dflash_config.'
    )


def test_reduced_vocabulary() -> None:
    raw = zlab(draft_vocab_size=100)
    config = parse_config(raw)
    shapes = required_tensors(config)
    assert shapes["lm_head.weight"] == (100, 64) and shapes["d2t"] == (100,)
    assert check_tensors(config, needed(raw)) == []
    assert only(check_tensors(config, needed(raw, d2t=None)), "no_d2t") == (
        "draft_vocab_size is 100 and vocab_size 256, but the checkpoint has no d2t. Without that map a "
        "drafted id cannot be turned into the target's. Use a checkpoint with d2t, or remove "
        "draft_vocab_size if the head is full."
    )
    assert only(check_tensors(config, needed(raw, **{"lm_head.weight": None})), "no_lm_head") == (
        "draft_vocab_size is 100 and vocab_size 256, but the checkpoint has no lm_head.weight. The target's "
        "head would give logits of other tokens. Use a checkpoint with its own lm_head, or correct "
        "config.json."
    )
    tensors = needed(raw) | {"d2t": TensorInfo("I32", (100,))}
    assert only(check_tensors(config, tensors), "d2t_dtype") == ("d2t is stored as I32; it holds ids and must be I64.")
    assert "lm_head.weight is [256, 64] and should be [100, 64]" in only(
        check_tensors(config, needed(raw, **{"lm_head.weight": (256, 64)})), "tensor_shapes"
    )
    assert "d2t is [90] and should be [100]" in only(check_tensors(config, needed(raw, d2t=(90,))), "tensor_shapes")


def test_own_head_that_is_not_there() -> None:
    raw = zlab(has_own_lm_head=True)
    assert only(check_tensors(parse_config(raw), needed(raw, **{"lm_head.weight": None})), "no_lm_head") == (
        "config.json says has_own_lm_head true, but the checkpoint has no lm_head.weight. The target's head "
        "would give logits of other tokens. Use a checkpoint with its own lm_head, or correct config.json."
    )


def fp8() -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    raw = zlab(quantization_config={"quant_method": "fp8"})
    tensors = needed(raw)
    for name, info in list(tensors.items()):
        if len(info.shape) == 2:
            tensors[name] = TensorInfo("F8_E4M3", info.shape)
            tensors[name.removesuffix("weight") + "weight_scale"] = TensorInfo("F32", (1,))
    return raw, tensors


def packed() -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    raw = zlab(quantization_config={"quant_method": "gptq", "bits": 4})
    tensors = needed(raw)
    for name, info in list(tensors.items()):
        if len(info.shape) == 2 and name.startswith("layers."):
            del tensors[name]
            module = name.removesuffix("weight")
            rows, columns = info.shape
            tensors[module + "qweight"] = TensorInfo("I32", (columns // 8, rows))
            tensors[module + "qzeros"] = TensorInfo("I32", (1, rows // 8))
            tensors[module + "scales"] = TensorInfo("F16", (1, rows))
            tensors[module + "g_idx"] = TensorInfo("I32", (columns,))
    return raw, tensors


def fused() -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    raw, tensors = packed()
    for name in list(tensors):
        for old, new in (("q_proj", "qkv_proj"), ("k_proj", None), ("v_proj", None)):
            if f".{old}." in name:
                info = tensors.pop(name)
                if new:
                    tensors[name.replace(old, new)] = info
    return raw, tensors


def nvfp4() -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    raw = zlab2(quantization_config={"quant_algo": "NVFP4"})
    tensors = needed(raw)
    for name, info in list(tensors.items()):
        if "proj.weight" in name:
            tensors[name] = TensorInfo("U8", (info.shape[0], info.shape[1] // 2))
            tensors[name + "_scale"] = TensorInfo("F8_E4M3", (info.shape[0], info.shape[1] // 16))
            tensors[name + "_scale_2"] = TensorInfo("F32", ())
    tensors["layers.0.self_attn.k_proj.k_scale"] = TensorInfo("F32", ())
    tensors["layers.0.self_attn.k_scale"] = TensorInfo("F32", (1,))
    return raw, tensors


@pytest.mark.parametrize("make", [fp8, packed, fused, nvfp4])
def test_quantised_drafts_are_not_refused(make: Any) -> None:
    raw, tensors = make()
    config = parse_config(raw)
    assert config.quant_method is not None
    assert check_tensors(config, tensors) == []
    # The scales alone show it too.
    assert [f for f in check_tensors(parse_config(raw | {"quantization_config": None}), tensors) if (
        f.severity == "error"
    )] == []  # fmt: skip


def test_what_surely_cannot_work_in_a_quantised_draft() -> None:
    raw, tensors = packed()
    del tensors["layers.1.self_attn.k_norm.weight"]
    missing = {name: info for name, info in tensors.items() if not name.startswith("layers.0.mlp.up_proj.")}
    assert "lacks 2 tensors: layers.0.mlp.up_proj.weight, layers.1.self_attn.k_norm.weight" in only(
        check_tensors(parse_config(raw), missing), "missing_tensors"
    )
    raw, tensors = fp8()
    tensors["layers.0.mlp.up_proj.weight"] = TensorInfo("F8_E4M3", (64, 64))
    assert "layers.0.mlp.up_proj.weight is [64, 64] and should be [96, 64]" in only(
        check_tensors(parse_config(raw), tensors), "tensor_shapes"
    )
    raw, tensors = nvfp4()
    tensors["smoothing.weight"] = TensorInfo("BF16", (64,))
    assert "smoothing.weight" in only(check_tensors(parse_config(raw), tensors), "unexpected_tensors", "warning")


def test_eight_bit_weights_without_a_word_about_their_scale() -> None:
    tensors = {name: TensorInfo("F8_E4M3", info.shape) for name, info in needed(zlab()).items()}
    assert only(check_tensors(parse_config(zlab()), tensors), "no_quantization_config", "warning") == (
        "hidden_norm.weight is stored as F8_E4M3, but config.json has no quantization_config. The numbers "
        "are read as they are, without any scale. If the checkpoint is quantised, take config.json from the "
        "same revision."
    )
