# SPDX-License-Identifier: Apache-2.0
"""Every mismatch of a pair, by the exact words, and pairs that fit."""

from typing import Any

import pytest

from tests.checkpoint.published import PUBLISHED, Published
from tests.checkpoint.samples import data, nested, speculators, target, zlab, zlab2
from vllm_dflash.checkpoint import (
    CheckpointError,
    IncompatibleDraft,
    TargetFacts,
    TensorInfo,
    check_pair,
    parse_config,
    require_compatible,
    required_tensors,
)

SHAPE = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 7}
OTHER = "Use the draft that was trained for this target."


def tensors(raw: dict[str, Any]) -> dict[str, TensorInfo]:
    shapes = required_tensors(parse_config(raw))
    return {name: TensorInfo("I64" if name == "d2t" else "BF16", shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("make", [zlab, zlab2, speculators])
def test_a_pair_that_fits(make: Any) -> None:
    assert check_pair(target(), parse_config(make()), tensors(make()), 7) == []
    assert require_compatible(target(), parse_config(make())) == []


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.draft)
def test_published_pairs_fit(published: Published) -> None:
    facts = TargetFacts.from_hf_config(
        {
            "text_config": {
                "vocab_size": published.vocab,
                "hidden_size": published.hidden,
                "num_hidden_layers": published.target_layers,
                "max_position_embeddings": 40960,
            }
        },
        published.target,
    )
    raw = published.raw()
    assert check_pair(facts, parse_config(raw), tensors(raw), published.block - 1) == []


def test_muse_glimmer() -> None:
    facts = target(vocab_size=202048, hidden_size=6656, num_layers=52, max_position_embeddings=131072)
    shapes = data("dflash2-muse-glimmer-30b.shapes.json")["shapes"]
    read = {name: TensorInfo("BF16", tuple(shape)) for name, shape in shapes.items()}
    assert check_pair(facts, parse_config(data("dflash2-muse-glimmer-30b.config.json")), read, 15) == []
    assistant = parse_config(data("dflash1-muse-glimmer-30b-assistant.config.json"))
    assert check_pair(facts, assistant, tensors(data("dflash1-muse-glimmer-30b-assistant.config.json"))) == []


CASES: list[tuple[str, dict[str, Any], dict[str, Any], int | None, str, str, str]] = [
    (
        "vocabulary", {"vocab_size": 300}, zlab(), None, "error", "vocab_size",
        f"The draft's vocabulary has 256 tokens, that of example/target 300. A drafted id would mean "
        f"another token, or none. {OTHER}",
    ),
    (
        "hidden size", {"hidden_size": 128}, zlab(), None, "error", "hidden_size",
        "The draft's hidden_size is 64, the hidden size of example/target is 128. The draft reads the "
        "target's "
        f"hidden states as they are. {OTHER}",
    ),
    (
        "target_hidden_size", {}, zlab(target_hidden_size=96), None, "error", "hidden_size",
        "The draft's target_hidden_size is 96, the hidden size of example/target is 64. The draft reads the "
        f"target's hidden states as they are. {OTHER}",
    ),
    (
        "taps", {"num_layers": 4}, zlab(num_target_layers=None), None, "error", "target_layer_ids",
        "The draft taps the target layers [1, 3, 5], but example/target has 4 layers, 0 to 3. " + OTHER,
    ),
    (
        "one layer too few", {"num_layers": 5}, zlab(num_target_layers=None), None,
        "error", "target_layer_ids",
        "The draft taps the target layers [1, 3, 5], but example/target has 5 layers, 0 to 4. " + OTHER,
    ),
    (
        "another number of layers", {"num_layers": 9}, zlab(), None, "warning", "num_target_layers",
        "The draft was trained for a target of 8 layers, example/target has 9. The taps exist, but may not "
        "hold "
        f"what the draft learned to read; acceptance may be low. {OTHER}",
    ),
    (
        "no taps at all", {}, zlab(use_aux_hidden_state=False), None, "error", "no_taps",
        "config.json says use_aux_hidden_state false: the draft was made without tapped layers. This "
        "package feeds a draft from tapped target layers only. Use a DFlash draft with target_layer_ids.",
    ),
    (
        "mask", {}, nested(zlab(), mask_token_id=256), None, "error", "mask_token_id",
        "mask_token_id is 256, but example/target embeds the ids 0 to 255 only. The mask slots would read "
        "past the "
        f"embedding table. {OTHER}",
    ),
    (
        "K", {}, zlab(), 8, "error", "num_speculative_tokens",
        "num_speculative_tokens is 8, but the draft's block_size of 8 gives 7 at most. One slot of the "
        "block is the anchor, which is verified already. Set num_speculative_tokens to a number from 1 to "
        "7, or leave it out.",
    ),
    (
        "K of 0", {}, zlab(), 0, "error", "num_speculative_tokens",
        "num_speculative_tokens is 0; this draft takes a number from 1 to 7. To serve without speculation, leave "
        "--speculative-config out.",
    ),
    (
        "positions", {"max_position_embeddings": 4096}, zlab(), None, "warning", "max_position_embeddings",
        "The draft's max_position_embeddings is 1024, but example/target goes to 4096. Beyond that length "
        "the draft was not trained, and few of its tokens will be accepted. Set --max-model-len 1024 if "
        "longer requests are not needed.",
    ),
    (
        "DFlash 2 with a reduced vocabulary", {}, zlab2(draft_vocab_size=100), None, "error",
        "dflash2_reduced_vocabulary",
        "The draft is a DFlash 2 one with draft_vocab_size 100, but a selector works on the full "
        "vocabulary, 256 tokens here. Use a DFlash 2 draft with the full vocabulary.",
    ),
    (
        "head too large", {"vocab_size": 256}, zlab(vocab_size=None, draft_vocab_size=300), None,
        "error", "vocab_size",
        f"The draft's head covers 300 tokens, example/target has only 256. {OTHER}",
    ),
    (
        "partial rotary", {}, zlab(rope_parameters={"partial_rotary_factor": 0.25}), None, "warning",
        "partial_rotary_factor",
        "config.json says partial_rotary_factor 0.25; it is not applied. A DFlash draft rotates its full "
        "head; the key is often copied from the target. Remove the key from the draft's config.json.",
    ),
    (
        "logit_scale in DFlash 2", {}, zlab2(logit_scale=0.5), None, "warning", "logit_scale",
        "config.json says logit_scale 0.5, which DFlash 2 does not read. Its factor on the logits is "
        "output_multiplier. Move the value there if the draft was trained with it.",
    ),
    (
        "unknown keys", {}, nested(zlab(), new_trick=1), None, "warning", "unknown_keys",
        "dflash_config has keys that nothing here reads: new_trick. If the draft was trained with what they "
        "say, its acceptance may be low.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "raw", "asked", "severity", "code", "message"),
    [c[1:] for c in CASES],
    ids=[c[0] for c in CASES],
)
def test_mismatch(
    facts: dict[str, Any], raw: dict[str, Any], asked: int | None, severity: str, code: str, message: str
) -> None:
    found = check_pair(target(**facts), parse_config(raw), None, asked)
    assert [(finding.severity, finding.code, str(finding)) for finding in found] == [(severity, code, message)]
    if severity == "warning":
        assert require_compatible(target(**facts), parse_config(raw), None, asked) == found
    else:
        with pytest.raises(IncompatibleDraft) as caught:
            require_compatible(target(**facts), parse_config(raw), None, asked, draft_name="example/draft")
        assert str(caught.value) == f"example/draft cannot draft for example/target:\n- {message}"
        assert list(caught.value.findings) == found


def test_every_error_stands_in_one_message() -> None:
    raw = zlab()
    headers = {name: info for name, info in tensors(raw).items() if name != "norm.weight"}
    facts = target(vocab_size=300, num_layers=4, max_position_embeddings=2048)
    with pytest.raises(IncompatibleDraft) as caught:
        require_compatible(facts, parse_config(raw), headers, 9)
    codes = [finding.code for finding in caught.value.findings]
    assert codes == ["vocab_size", "target_layer_ids", "num_speculative_tokens", "missing_tensors"]
    assert str(caught.value).count("\n- ") == 4
    assert isinstance(caught.value, CheckpointError) and caught.value.finding.code == "incompatible"
    severities = [finding.severity for finding in check_pair(facts, parse_config(raw), headers, 9)]
    assert severities == ["error"] * 4 + ["warning"]


def test_a_draft_of_another_width_needs_its_own_embedding_and_head() -> None:
    raw = zlab(target_hidden_size=128)
    facts, config, headers = target(hidden_size=128), parse_config(raw), tensors(raw)
    assert headers["fc.weight"].shape == (64, 3 * 128)
    [finding] = check_pair(facts, config, headers)
    assert str(finding) == (
        "The draft is 64 wide, example/target 128, and the checkpoint has no embed_tokens.weight and no "
        "lm_head.weight of its own. A draft can share these with the target only where both have the same "
        "hidden size. Use a checkpoint that brings them."
    )
    headers["embed_tokens.weight"] = TensorInfo("BF16", (256, 64))
    [finding] = check_pair(facts, config, headers)
    assert "and the checkpoint has no lm_head.weight of its own" in str(finding)
    headers["lm_head.weight"] = TensorInfo("BF16", (256, 64))
    assert check_pair(facts, config, headers) == []


def test_fc_trained_for_another_width_is_named() -> None:
    raw = zlab()
    headers = tensors(raw) | {"fc.weight": TensorInfo("BF16", (64, 3 * 96))}
    [finding] = check_pair(target(), parse_config(raw), headers)
    assert finding.code == "fc_width"
    assert "fc.weight takes 288 features, but 3 taps of a target of hidden size 64 give 192." in finding.what


def test_reduced_vocabulary_without_its_map_or_head() -> None:
    raw = zlab(draft_vocab_size=100)
    headers = tensors(raw)
    assert check_pair(target(), parse_config(raw), headers) == []
    del headers["d2t"], headers["lm_head.weight"]
    assert [f.code for f in check_pair(target(), parse_config(raw), headers)] == ["no_d2t", "no_lm_head"]


def test_vocabulary_that_the_config_leaves_out_is_the_targets() -> None:
    raw = zlab(vocab_size=None, draft_vocab_size=256)
    assert check_pair(target(), parse_config(raw), tensors(zlab())) == []


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (SHAPE | {"max_position_embeddings": 6}, (9, 8, 7, 6)),
        ({"vocab_size": 9, "n_embd": 8, "n_layer": 7, "n_positions": 6}, (9, 8, 7, 6)),
        (SHAPE, (9, 8, 7, None)),
        (
            {"hidden_size": 1, "vision_config": {"hidden_size": 2}, "text_config": SHAPE, "n_positions": 6},
            (9, 8, 7, 6),
        ),
        ({"thinker_config": {"text_config": SHAPE}}, (9, 8, 7, None)),
    ],
)
def test_target_facts(raw: dict[str, Any], expected: Any) -> None:
    facts = TargetFacts.from_hf_config(raw, "t")
    got = (facts.vocab_size, facts.hidden_size, facts.num_layers, facts.max_position_embeddings)
    assert got == expected
    assert TargetFacts.from_hf_config(raw, "t", max_model_len=5).max_position_embeddings == 5


def test_target_without_a_fact() -> None:
    with pytest.raises(CheckpointError) as caught:
        TargetFacts.from_hf_config({"vocab_size": 9, "hidden_size": 8}, "example/target")
    assert str(caught.value) == (
        "The config of the target example/target has no num_hidden_layers. A draft cannot be checked against it."
    )
    with pytest.raises(CheckpointError) as caught:
        TargetFacts.from_hf_config([], "example/target")
    assert str(caught.value) == "The config of example/target is [], not an object."
