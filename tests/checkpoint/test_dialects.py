# SPDX-License-Identifier: Apache-2.0
"""config.json of both dialects, key by key, and every refusal by its words."""

from typing import Any

import pytest

from tests.checkpoint.published import PUBLISHED, Published
from tests.checkpoint.samples import data, nested, speculators, zlab, zlab2
from vllm_dflash.checkpoint import CheckpointError, DraftConfig, is_ours, parse_config
from vllm_dflash.checkpoint.dialects import default_target_layers

SLIDING, FULL = "sliding_attention", "full_attention"


def refusal(raw: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_config(raw)
    assert str(caught.value) == str(caught.value.finding)
    return str(caught.value)


def test_muse_glimmer_dflash2() -> None:
    config = parse_config(data("dflash2-muse-glimmer-30b.config.json"))
    assert config.is_dflash2
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (6656, 5, 19968)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert config.target_layer_ids == (1, 13, 25, 37, 49)
    assert config.aux_layer_ids == (2, 14, 26, 38, 50)
    assert config.num_taps == 5 and config.num_target_layers == 52
    assert config.mask_token_id == 201818 and config.vocab_size == 202048
    assert config.block_size == 16 and config.num_draft_tokens == 15
    assert config.layer_windows == (2048,) * 5 and config.layer_causal == (False,) * 5
    assert config.window(4) == 2048 and not config.is_causal(4)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert config.rms_norm_eps == 1e-5
    assert config.output_multiplier == config.logit_multiplier == 0.19611613513818404
    assert config.softcap == 20.0
    assert (config.conv_kernel_size, config.conv_group_size, config.conv_groups) == (2, 16, 416)
    assert (config.selector_rank, config.selector_top_k) == (256, 16)
    assert not config.needs_own_lm_head and not config.reduced_vocabulary
    assert config.unknown_keys == ()


def test_muse_glimmer_assistant_is_dflash_with_flat_keys() -> None:
    raw = data("dflash1-muse-glimmer-30b-assistant.config.json")
    assert is_ours(raw)
    config = parse_config(raw)
    assert config.architecture == "DFlashDraftModel"
    assert config.declared_architecture == "MuseGlimmerAssistantModel"
    assert config.target_layer_ids == (1, 13, 25, 37, 49) and config.mask_token_id == 201818
    assert config.block_size == 16
    assert config.vocab_size is None
    assert config.layer_windows == (2048,) * 5
    # Its layers are named sliding, which would be causal, but the block is not.
    assert config.layer_causal == (False,) * 5
    assert parse_config(raw | {"is_causal": True}).layer_causal == (True,) * 5


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.draft)
def test_published(published: Published) -> None:
    raw = published.raw()
    assert is_ours(raw)
    config = parse_config(raw)
    window = published.window or None
    mixed = published.window and not published.is_dflash2
    assert config.is_dflash2 == published.is_dflash2
    assert config.num_draft_tokens == published.block - 1
    assert config.target_layer_ids == published.taps
    assert config.layer_windows == (window,) * (published.layers - 1) + (None if mixed else window,)
    assert config.layer_causal == tuple(bool(mixed) and kind == SLIDING for kind in published.layer_types)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": published.theta}


def test_defaults() -> None:
    config = parse_config(zlab(block_size=None, rope_theta=None))
    assert config.block_size == 16
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.is_neox_style and config.use_aux_hidden_state
    assert config.logit_scale == config.output_multiplier == config.input_embedding_scale == 1.0
    assert config.softcap is None and config.attention_value_scale is None
    assert not config.attention_sink_bias and not config.attention_bias and not config.has_own_lm_head


def test_every_drafter_key_is_read_nested_first_then_at_the_top() -> None:
    values: dict[str, tuple[Any, Any]] = {
        "mask_token_id": (7, 9),
        "target_layer_ids": ([0, 2], [0, 4]),
        "block_size": (4, 6),
        "swa_window_size": (32, 48),
        "attention_value_scale": (0.5, 0.25),
        "input_embedding_scale": (2.0, 3.0),
        "output_multiplier": (0.5, 0.25),
        "final_logit_softcapping": (10.0, 20.0),
        "attention_sink_bias": (True, False),
        "use_aux_hidden_state": (False, True),
        "conv_kernel_size": (3, 4),
        "conv_group_size": (8, 32),
        "selector_rank": (5, 6),
        "selector_top_k": (2, 3),
        "num_target_layers": (9, 10),
    }
    inside = {key: pair[0] for key, pair in values.items()} | {"use_swa": True}
    outside = {key: pair[1] for key, pair in values.items()} | {"use_swa": True}

    def seen(config: DraftConfig) -> dict[str, Any]:
        got = {key: getattr(config, key) for key in values if hasattr(config, key)}
        return got | {"target_layer_ids": list(config.target_layer_ids), "swa_window_size": config.window(0)}

    both = zlab2(**outside) | {"dflash_config": inside}
    assert seen(parse_config(both)) == {key: pair[0] for key, pair in values.items()}
    flat = zlab2(**outside) | {"dflash_config": {}}
    assert seen(parse_config(flat)) == {key: pair[1] for key, pair in values.items()}


def test_top_level_keys_are_read() -> None:
    raw = zlab(logit_scale=0.5, target_hidden_size=128, has_own_lm_head=True, attention_bias=True)
    raw |= {"is_neox_style": False, "draft_vocab_size": 100, "add_swa_attention_sink_bias": True}
    config = parse_config(raw | {"torch_dtype": "bfloat16"})
    assert config.logit_scale == config.logit_multiplier == 0.5
    assert config.target_hidden_size == 128 and config.has_own_lm_head and config.attention_bias
    assert not config.is_neox_style and config.attention_sink_bias
    assert config.draft_vocab_size == 100 and config.reduced_vocabulary and config.needs_own_lm_head
    assert config.dtype == "bfloat16"


def test_the_logits_factor_and_cap_of_each_architecture() -> None:
    keys = {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    first, second = (parse_config(nested(make(logit_scale=0.25), **keys)) for make in (zlab, zlab2))
    assert (first.logit_multiplier, first.softcap) == (0.25, None)
    assert (second.logit_multiplier, second.softcap) == (0.5, 20.0)


def test_head_dim_and_kv_heads_are_derived_where_absent() -> None:
    config = parse_config(zlab(head_dim=None, num_key_value_heads=None))
    assert config.head_dim == 16 and config.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("is_causal", "causal", "layer_types", "expected"),
    [
        (None, None, None, (False, False)),
        (None, None, [SLIDING, FULL], (True, False)),
        (None, None, [SLIDING, SLIDING], (True, True)),
        (None, None, [FULL, FULL], (False, False)),
        (None, False, [SLIDING, FULL], (False, False)),
        (None, True, [SLIDING, FULL], (True, True)),
        (None, True, None, (True, True)),
        (False, True, [SLIDING, FULL], (False, False)),
        (True, False, [SLIDING, FULL], (True, True)),
        (True, None, None, (True, True)),
    ],
)
def test_causality(is_causal: Any, causal: Any, layer_types: Any, expected: Any) -> None:
    raw = nested(zlab(is_causal=is_causal, layer_types=layer_types, sliding_window=64), causal=causal)
    assert parse_config(raw).layer_causal == expected


@pytest.mark.parametrize(
    ("layer_types", "top", "inner", "expected"),
    [
        (None, {}, {}, (None, None)),
        (None, {"sliding_window": 64}, {}, (None, None)),
        ([SLIDING, FULL], {"sliding_window": 64}, {}, (64, None)),
        ([SLIDING, FULL], {"sliding_window": 64}, {"swa_window_size": 32}, (32, None)),
        ([SLIDING, FULL], {"sliding_window": 64, "use_sliding_window": True}, {}, (64, None)),
        (None, {"sliding_window": 64}, {"use_swa": True}, (64, 64)),
        ([FULL, FULL], {}, {"use_swa": True, "swa_window_size": 32}, (32, 32)),
        ([SLIDING, FULL], {}, {"use_swa": True, "swa_window_size": 32}, (32, None)),
        ([SLIDING, FULL], {"use_sliding_window": False}, {"swa_window_size": 32}, (32, None)),
        # Hugging Face's rule for a config without layer_types.
        (None, {"sliding_window": 64, "use_sliding_window": True}, {}, (None, None)),
        (None, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, {}, (None, 64)),
        (None, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, {}, (64, 64)),
    ],
)
def test_windows(layer_types: Any, top: dict[str, Any], inner: dict[str, Any], expected: Any) -> None:
    assert parse_config(nested(zlab(layer_types=layer_types, **top), **inner)).layer_windows == expected


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({"rope_theta": 10000}, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
        (
            {"rope_theta": 7, "rope_parameters": {"rope_theta": 5}},
            {"rope_type": "default", "rope_theta": 5.0},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "rope_theta": 1e6,
            },
        ),
        # A multimodal target's sections mean nothing to 1-D positions.
        (
            {
                "rope_parameters": {
                    "rope_type": "mrope",
                    "mrope_section": [8, 4, 4],
                    "mrope_interleaved": True,
                }
            },
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e4}},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {
                "rope_parameters": {
                    SLIDING: {"rope_theta": 1e4},
                    FULL: {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            {"rope_type": "default", "rope_theta": 1e4},
        ),
    ],
)
def test_rope(top: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse_config(zlab(**top))
    assert config.rope_parameters == expected
    assert config.partial_rotary_factor == 1.0


def test_partial_rotary_factor_is_kept_apart() -> None:
    config = parse_config(zlab(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert config.partial_rotary_factor == 0.25


def test_old_checkpoints_without_taps_use_the_formula() -> None:
    assert default_target_layers(5, 36) == (1, 9, 17, 25, 33)
    assert default_target_layers(1, 36) == (18,)
    raw = nested(zlab(num_hidden_layers=5, num_target_layers=36), target_layer_ids=None)
    assert parse_config(raw).target_layer_ids == (1, 9, 17, 25, 33)
    unnamed = {key: value for key, value in raw.items() if key != "num_target_layers"}
    assert parse_config(unnamed, num_target_layers=36).target_layer_ids == (1, 9, 17, 25, 33)
    assert refusal(unnamed) == (
        "config.json names no target_layer_ids, and no num_target_layers to derive them from. Add "
        "dflash_config.target_layer_ids: the tapped decoder layers, counted from 0."
    )


def test_taps_in_vllm_convention_count_from_one() -> None:
    raw = nested(zlab(eagle_aux_hidden_state_layer_ids=[2, 4]), target_layer_ids=None)
    assert parse_config(raw).target_layer_ids == (1, 3)
    assert parse_config(nested(raw, target_layer_ids=[1, 3])).target_layer_ids == (1, 3)
    assert refusal(nested(raw, target_layer_ids=[2, 4])) == (
        "target_layer_ids [2, 4] and eagle_aux_hidden_state_layer_ids [2, 4] disagree. The second counts "
        "from 1, so it should be the first plus one. Keep the ids the draft was trained with; off by one is "
        "silent and only acceptance drops."
    )


def test_unknown_keys_are_remembered() -> None:
    assert parse_config(nested(zlab(), new_trick=3, causal_head=False)).unknown_keys == (
        "causal_head",
        "new_trick",
    )


def test_speculators() -> None:
    config = parse_config(speculators())
    assert config.dialect == "speculators" and config.architecture == "DFlashDraftModel"
    assert config.target_layer_ids == (1, 3, 5)
    assert config.block_size == 8 and config.num_draft_tokens == 7
    assert config.mask_token_id == 255 and config.hidden_size == 64
    assert not config.reduced_vocabulary
    assert parse_config(speculators(block_size=4, target_hidden_size=128)).target_hidden_size == 128
    assert parse_config(speculators(block_size=4)).block_size == 4


def test_speculators_dflash2() -> None:
    config = parse_config(speculators("dflash2", draft_vocab_size=None))
    assert config.is_dflash2 and config.selector_rank == 8 and config.conv_groups == 4
    assert config.draft_vocab_size is None


def test_speculators_vocabulary_defaults_to_32000() -> None:
    raw = speculators(draft_vocab_size=None)
    raw["transformer_layer_config"]["vocab_size"] = 151936
    config = parse_config(raw)
    assert config.draft_vocab_size == 32000 and config.reduced_vocabulary and config.needs_own_lm_head
    assert parse_config(raw | {"draft_vocab_size": None}).draft_vocab_size is None
    raw2 = raw | speculators("dflash2", draft_vocab_size=None) | {
        "transformer_layer_config": raw["transformer_layer_config"]
    }  # fmt: skip
    assert parse_config(raw2).draft_vocab_size is None


@pytest.mark.parametrize(
    ("non_causal", "layer_types", "expected"),
    [
        (None, [SLIDING, FULL], (False, False)),
        (True, [SLIDING, FULL], (False, False)),
        (False, [SLIDING, FULL], (True, False)),
        # Full attention layers of that format are never causal.
        (False, [FULL, FULL], (False, False)),
        (False, [SLIDING, SLIDING], (True, True)),
    ],
)
def test_speculators_causality(non_causal: Any, layer_types: Any, expected: Any) -> None:
    raw = speculators(sliding_window_non_causal=non_causal)
    raw["transformer_layer_config"] |= {"layer_types": layer_types, "sliding_window": 64}
    assert parse_config(raw).layer_causal == expected


@pytest.mark.parametrize(
    ("raw", "ours"),
    [
        (zlab(), True),
        (zlab2(), True),
        (speculators(), True),
        (speculators("dflash2"), True),
        (speculators("dspark"), False),
        (speculators("eagle3"), False),
        (zlab(architectures=["DFlashMuseGlimmerAssistantModel"]), True),
        (zlab(architectures=["LiLiCorrDraftModel"]), False),
        (zlab(architectures=["DFlash2DraftModel", "LiLiCorrDraftModel"]), False),
        (zlab(architectures=["DFlashLagunaForCausalLM"]), False),
        (zlab(architectures=["Qwen3DSparkModel"]), False),
        (zlab(architectures=["XPressDraftModel"]), False),
        (zlab(architectures=["Qwen3ForCausalLM"]), False),
        (zlab(architectures=[]), False),
        (zlab(architectures="DFlashDraftModel"), False),
        ({}, False),
        ([], False),
        (None, False),
        ({"speculators_model_type": ["dflash"]}, False),
        (zlab() | {"speculators_model_type": None}, True),
        ({"architectures": [["DFlashDraftModel"]]}, False),
    ],
)
def test_is_ours(raw: Any, ours: bool) -> None:
    assert is_ours(raw) is ours
    if not ours:
        refusal(raw)


def test_dflash2_wins_where_both_architectures_are_named() -> None:
    assert parse_config(zlab2() | {"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}).is_dflash2
