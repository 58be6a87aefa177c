# SPDX-License-Identifier: Apache-2.0
"""Every config.json that is refused, by the exact words."""

from typing import Any

import pytest

from tests.checkpoint.samples import nested, speculators, zlab, zlab2
from vllm_dflash.checkpoint import CheckpointError, parse_config

SLIDING, FULL = "sliding_attention", "full_attention"
ANCHOR = (
    "There the anchor slot already predicts, while DFlash predicts from the mask slots only: served as "
    "DFlash, every draft would stand one position off and under 1 % would be accepted (vllm#49614). Use a "
    "draft trained for DFlash, or serve this one with its own method."
)
SERVED = (
    "This package serves DFlashDraftModel, MuseGlimmerAssistantModel, DFlashMuseGlimmerAssistantModel, "
    "DFlash2DraftModel; leave others to stock vLLM."
)
TYPES = speculators()["transformer_layer_config"]

REFUSED: list[tuple[str, Any, str]] = [
    ("list", [], "config.json holds a list, not a JSON object."),
    ("no architecture", zlab(architectures=None), f"The checkpoint's architectures are None. {SERVED}"),
    (
        "lilicorr",
        zlab(architectures=["LiLiCorrDraftModel"]),
        "The checkpoint's architectures are ['LiLiCorrDraftModel']. That is another method: LiLiCorr has a "
        f"correction head of its own. {SERVED}",
    ),
    (
        "deepspec",
        zlab(architectures=["Qwen3DSparkModel"], markov_rank=0),
        "The checkpoint's architectures are ['Qwen3DSparkModel']. That is another method: DSpark predicts "
        "from "
        f"the anchor slot (vllm#49614); use method dspark. {SERVED}",
    ),
    (
        "speculators of another type",
        speculators("eagle3"),
        "The checkpoint is a speculators draft of type 'eagle3'. This package serves the types dflash and "
        "dflash2; leave others to stock vLLM.",
    ),
    (
        "sample_from_anchor nested",
        nested(zlab(), sample_from_anchor=True),
        f"The checkpoint says sample_from_anchor True. {ANCHOR}",
    ),
    (
        "sample_from_anchor at the top",
        zlab(sample_from_anchor=True),
        f"The checkpoint says sample_from_anchor True. {ANCHOR}",
    ),
    (
        "sample_from_anchor in speculators",
        speculators(sample_from_anchor=True),
        f"The checkpoint says sample_from_anchor True. {ANCHOR}",
    ),
    (
        "query_zero_predicts_next",
        nested(zlab(), query_zero_predicts_next=True),
        f"The checkpoint says query_zero_predicts_next True. {ANCHOR}",
    ),
    ("relabelled deepspec", zlab(markov_rank=0), f"The checkpoint says markov_rank 0. {ANCHOR}"),
    ("shifted labels", nested(zlab(), shift_label=True), f"The checkpoint says shift_label True. {ANCHOR}"),
    (
        "domino",
        nested(zlab(), projector_type="domino"),
        "The checkpoint says projector_type 'domino', which is another method's head. Use a draft trained "
        "for DFlash, or serve this one with its own method.",
    ),
    (
        "odd sample_from_anchor",
        zlab(sample_from_anchor=1),
        "sample_from_anchor is 1 in config.json; it must be true or false.",
    ),
    (
        "dflash_config no object",
        zlab(dflash_config=[1]),
        "dflash_config is [1] in config.json; it must be an object.",
    ),
    ("no hidden_size", zlab(hidden_size=None), "config.json lacks hidden_size."),
    (
        "no mask",
        nested(zlab(), mask_token_id=None),
        "config.json lacks mask_token_id.",
    ),
    (
        "negative mask",
        nested(zlab(), mask_token_id=-1),
        "mask_token_id is -1 in config.json; it must be at least 0.",
    ),
    (
        "text for a number",
        zlab(intermediate_size="96"),
        "intermediate_size is '96' in config.json; it must be a whole number.",
    ),
    (
        "fraction for a count",
        zlab(vocab_size=256.5),
        "vocab_size is 256.5 in config.json; it must be a whole number.",
    ),
    (
        "true for a count",
        zlab(vocab_size=True),
        "vocab_size is True in config.json; it must be a whole number.",
    ),
    (
        "two at once",
        zlab(vocab_size=0, rms_norm_eps=0),
        "rms_norm_eps is 0 in config.json; it must be greater than 0. vocab_size is 0 in config.json; it "
        "must be at least 1.",
    ),
    (
        "infinite",
        zlab(logit_scale=float("inf")),
        "logit_scale is inf in config.json; it must be a finite number.",
    ),
    (
        "bool as text",
        zlab(attention_bias="no"),
        "attention_bias is 'no' in config.json; it must be true or false.",
    ),
    (
        "layers as text",
        zlab(num_hidden_layers="2"),
        "num_hidden_layers is '2' in config.json; it must be a whole number of at least 1.",
    ),
    (
        "a million layers",
        zlab(num_hidden_layers=1000000),
        "num_hidden_layers is 1000000 in config.json; it must be from 1 to 1024.",
    ),
    ("block of one", zlab(block_size=1), "block_size is 1 in config.json; it must be at least 2."),
    (
        "heads",
        zlab(num_key_value_heads=3),
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3; every key head must serve the "
        "same number of query heads.",
    ),
    ("odd head", zlab(head_dim=31), "head_dim is 31; rotary positions need an even head size."),
    (
        "head_dim not derivable",
        zlab(head_dim=None, hidden_size=66),
        "hidden_size 66 is not a multiple of num_attention_heads 4, and head_dim is not given.",
    ),
    (
        "gelu",
        zlab(hidden_act="gelu"),
        "hidden_act is 'gelu'; a DFlash draft's MLP is SwiGLU, so it must be 'silu'.",
    ),
    (
        "no taps",
        nested(zlab(), target_layer_ids=[]),
        "target_layer_ids is empty; the draft needs at least one tapped target layer.",
    ),
    (
        "taps no list",
        nested(zlab(), target_layer_ids="1,3"),
        "target_layer_ids is '1,3' in config.json; it must be a list of whole numbers.",
    ),
    (
        "negative tap",
        nested(zlab(), target_layer_ids=[-1, 3]),
        "target_layer_ids [-1, 3] has a negative id; ids are decoder layers counted from 0.",
    ),
    (
        "tap twice",
        nested(zlab(), target_layer_ids=[1, 3, 3]),
        "target_layer_ids [1, 3, 3] names a layer twice; each tapped layer must stand once.",
    ),
    (
        "taps unsorted",
        nested(zlab(), target_layer_ids=[5, 1, 3]),
        "target_layer_ids [5, 1, 3] is not ascending. The engine collects taps in layer order: fc would "
        "read them in another order than it was trained on. Sort the ids and permute the columns of "
        "fc.weight the same way.",
    ),
    (
        "speculators taps from 0",
        speculators(aux_hidden_state_layer_ids=[0, 4]),
        "aux_hidden_state_layer_ids [0, 4] has the id 0; ids there count from 1. 0 would be the embedding, "
        "which a DFlash draft does not tap.",
    ),
    (
        "speculators without taps",
        speculators(aux_hidden_state_layer_ids=None),
        "config.json lacks aux_hidden_state_layer_ids, the tapped target layers.",
    ),
    (
        "speculators without a layer",
        speculators(transformer_layer_config=None),
        "config.json lacks transformer_layer_config, the draft's layer shape.",
    ),
    (
        "no window",
        zlab(layer_types=[SLIDING, FULL]),
        "Draft layers [0] use sliding attention, but config.json gives no window. Set "
        "dflash_config.swa_window_size or sliding_window to the size the draft was trained with.",
    ),
    (
        "use_sliding_window without a window",
        zlab(use_sliding_window=True, max_window_layers=1),
        "Draft layers [1] use sliding attention, but config.json gives no window. Set "
        "dflash_config.swa_window_size or sliding_window to the size the draft was trained with.",
    ),
    (
        "use_swa without a window",
        nested(zlab(), use_swa=True),
        "Draft layers [0, 1] use sliding attention, but config.json gives no window. Set "
        "dflash_config.swa_window_size or sliding_window to the size the draft was trained with.",
    ),
    (
        "window switched off",
        zlab(layer_types=[SLIDING, FULL], sliding_window=64, use_sliding_window=False),
        "layer_types has 'sliding_attention' and sliding_window is 64, but use_sliding_window is false. The "
        "two say opposite things about how the draft was trained. Set use_sliding_window to true, or those "
        "layer_types to 'full_attention'.",
    ),
    (
        "window of 0",
        zlab(layer_types=[SLIDING, FULL], sliding_window=0),
        "sliding_window is 0 in config.json; it must be a whole number of at least 1.",
    ),
    (
        "layer_types too short",
        zlab(layer_types=[FULL]),
        "layer_types has 1 entries, but num_hidden_layers is 2. Give one entry a draft layer.",
    ),
    (
        "unknown layer type",
        zlab(layer_types=[FULL, "linear_attention"]),
        "layer_types has 'linear_attention'; a DFlash draft has 'full_attention' and 'sliding_attention' only.",
    ),
    (
        "layer_types no list",
        zlab(layer_types="full_attention"),
        "layer_types is 'full_attention' in config.json; it must be a list of names.",
    ),
    ("causal as text", zlab(is_causal="no"), "is_causal is 'no' in config.json; it must be true or false."),
    (
        "two rotations",
        zlab(rope_parameters={"rope_theta": 1e4}, rope_scaling={"rope_theta": 1e6}),
        "rope_parameters {'rope_theta': 10000.0} and rope_scaling {'rope_theta': 1000000.0} disagree in "
        "config.json. A wrong rotation is silent: acceptance collapses and nothing else shows it. Keep the "
        "one that the draft was trained with.",
    ),
    (
        "rotation a layer",
        zlab(
            layer_types=[SLIDING, FULL],
            sliding_window=8,
            rope_parameters={SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6}},
        ),
        "rope_parameters differs between full_attention and sliding_attention in config.json. The context's "
        "keys are rotated once for all draft layers. A draft with a rotation of its own in some layers "
        "cannot be served.",
    ),
    (
        "rope_type",
        zlab(rope_parameters={"rope_type": "spiral"}),
        "rope_type is 'spiral'; known are default, linear, dynamic, ntk, yarn, llama3, longrope.",
    ),
    (
        "theta",
        zlab(rope_theta=0),
        "RoPE's rope_theta is 0 in config.json; it must be a number above 0.",
    ),
    (
        "factor",
        zlab(rope_scaling={"type": "yarn"}),
        "RoPE's factor is None in config.json; it must be a number above 0.",
    ),
    (
        "draft vocabulary too large",
        zlab(draft_vocab_size=300),
        "draft_vocab_size 300 is larger than vocab_size 256.",
    ),
    (
        "selector keys missing",
        nested(zlab2(), selector_rank=None, selector_top_k=None),
        "The checkpoint is a DFlash 2 draft (DFlash2DraftModel), but its config.json lacks selector_rank and "
        "selector_top_k. Copy config.json from the checkpoint's publisher, or add the keys to dflash_config.",
    ),
    (
        "convolution keys missing",
        nested(zlab2(), conv_kernel_size=None),
        "The checkpoint is a DFlash 2 draft (DFlash2DraftModel), but its config.json lacks "
        "conv_kernel_size. Copy config.json from the checkpoint's publisher, or add the keys to "
        "dflash_config.",
    ),
    (
        "all four missing in speculators",
        speculators() | {"speculators_model_type": "dflash2"},
        "The checkpoint is a DFlash 2 draft (speculators dflash2), but its config.json lacks "
        "conv_kernel_size, conv_group_size, selector_rank and selector_top_k. Copy config.json from the "
        "checkpoint's publisher, or add the keys to dflash_config.",
    ),
    (
        "convolution groups",
        nested(zlab2(), conv_group_size=24),
        "conv_group_size 24 does not divide hidden_size 64; the convolution works on groups of equal width.",
    ),
    (
        "more candidates than tokens",
        nested(zlab2(), selector_top_k=300),
        "selector_top_k 300 is larger than vocab_size 256.",
    ),
    (
        "dflash 2 under the name of dflash",
        zlab2() | {"architectures": ["DFlashDraftModel"]},
        "config.json has conv_kernel_size, conv_group_size, selector_rank and selector_top_k but names the "
        "architecture DFlashDraftModel. Served as DFlash it would draft without its convolution and "
        "selector. If "
        'the checkpoint is a DFlash 2 one, set "architectures": ["DFlash2DraftModel"]; if not, remove these '
        "keys.",
    ),
]


@pytest.mark.parametrize(("raw", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refusal(raw: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_config(raw)
    assert str(caught.value) == message
    assert caught.value.finding.severity == "error"


def test_what_a_checkpoint_says_is_not_repeated_at_length() -> None:
    with pytest.raises(CheckpointError, match="hidden_act is 'silu999") as caught:
        parse_config(zlab() | {"hidden_act": "silu" + 5000 * "9"})
    assert len(str(caught.value)) < 200
    assert len(str(CheckpointError("bad_config", 5000 * "9"))) < 900


def test_draft_config_is_frozen_and_closed() -> None:
    config = parse_config(zlab())
    with pytest.raises(ValueError, match="frozen"):
        config.block_size = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="sample_from_anchor"):
        type(config)(**(dict(config) | {"sample_from_anchor": True}))
