# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in the files, the answer is a value or a CheckpointError."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.samples import data, speculators, target, zlab, zlab2
from vllm_dflash.checkpoint import (
    CheckpointError,
    DraftConfig,
    TargetFacts,
    TensorInfo,
    check_pair,
    find_draft,
    is_ours,
    parse_config,
    read_folder,
    read_header,
    required_tensors,
)
from vllm_dflash.checkpoint.bounded_json import parse_json_object
from vllm_dflash.checkpoint.safetensors_header import INDEX_FILE

WORDS = st.sampled_from(
    [
        "full_attention",
        "sliding_attention",
        "yarn",
        "default",
        "silu",
        "DFlashDraftModel",
        "dflash",
        "dflash2",
        "",
    ]
)
# A small alphabet: building hypothesis's table of all of Unicode takes longer than these tests.
TEXT = st.text('ab/._-\\"[]{}: \n\0é\ud800', max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-2, 300) | st.floats() | WORDS | TEXT
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(WORDS | TEXT, inner, max_size=4),
    max_leaves=6,
)
BASES = [
    zlab(),
    zlab2(),
    speculators(),
    speculators("dflash2"),
    data("dflash2-muse-glimmer-30b.config.json"),
    data("dflash1-muse-glimmer-30b-assistant.config.json"),
]
KEYS = sorted(
    {key for raw in BASES for key in raw}
    | {key for raw in BASES for key in raw.get("dflash_config", {})}
    | {
        "rope_scaling", "rope_parameters", "layer_types", "is_causal", "causal", "use_swa", "swa_window_size",
        "draft_vocab_size", "target_hidden_size", "quantization_config", "sample_from_anchor", "markov_rank",
        "eagle_aux_hidden_state_layer_ids", "attention_sink_bias", "logit_scale", "sliding_window_non_causal",
        "max_window_layers", "use_sliding_window", "sliding_window", "partial_rotary_factor", "dtype",
    }
)  # fmt: skip
LEVELS = ("", "dflash_config", "transformer_layer_config")
QUICK = settings(max_examples=100, deadline=None, derandomize=True)
FILES = settings(QUICK, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def parsed(raw: Any) -> DraftConfig | None:
    try:
        return parse_config(raw)
    except CheckpointError as error:
        assert str(error).endswith((".", ")")) and str(error)[0] != " "
        return None


def changed(raw: dict[str, Any], edits: list[tuple[str, str, Any]]) -> dict[str, Any]:
    result = json.loads(json.dumps(raw))
    for level, key, value in edits:
        inside = result.get(level) if level else result
        if isinstance(inside, dict):
            inside[key] = value
    return result


@given(JSON)
@QUICK
def test_any_json_is_parsed_or_refused(raw: Any) -> None:
    assert is_ours(raw) in (True, False)
    parsed(raw)


@given(
    st.sampled_from(BASES),
    st.lists(st.tuples(st.sampled_from(LEVELS), st.sampled_from(KEYS), JSON), min_size=1, max_size=3),
)
@settings(QUICK, max_examples=300)
def test_a_damaged_config_is_parsed_or_refused(raw: dict[str, Any], edits: list[tuple[str, str, Any]]) -> None:
    config = parsed(changed(raw, edits))
    if config is not None:
        assert len(config.layer_windows) == len(config.layer_causal) == config.num_hidden_layers
        assert list(config.target_layer_ids) == sorted(set(config.target_layer_ids))
        assert config.num_draft_tokens >= 1
        shapes = required_tensors(config)
        assert all(size >= 1 for shape in shapes.values() for size in shape)
        check_pair(target(), config, {name: TensorInfo("BF16", shape) for name, shape in shapes.items()}, 3)


@given(
    st.sampled_from(BASES[:4]),
    st.dictionaries(
        st.sampled_from(["fc.weight", "norm.weight", "d2t", "t2d", "lm_head.weight", "embed_tokens.weight", "x.scale"])
        | TEXT,
        st.builds(
            TensorInfo,
            st.sampled_from(["BF16", "I64", "F8_E4M3", "U8", "??"]),
            st.lists(st.integers(0, 300), max_size=3).map(tuple),
        ),
        max_size=6,
    ),
    st.integers(-2, 20),
)
@QUICK
def test_any_headers_are_checked(raw: dict[str, Any], tensors: dict[str, TensorInfo], asked: int) -> None:
    findings = check_pair(target(), parse_config(raw), tensors, asked)
    assert any(finding.code in ("missing_tensors", "bad_weights") for finding in findings)
    assert all(finding.what and finding.severity in ("error", "warning") for finding in findings)


@given(JSON, st.integers(1, 9) | st.none())
@QUICK
def test_any_target_config(raw: Any, length: int | None) -> None:
    for config in (raw, {"text_config": raw, "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 7}):
        try:
            facts = TargetFacts.from_hf_config(config, "t", max_model_len=length)
        except CheckpointError:
            continue
        assert facts.vocab_size >= 1 and facts.num_layers >= 1


@given(st.binary(max_size=200))
@QUICK
def test_any_bytes_are_no_json_or_an_object(text: bytes) -> None:
    try:
        assert isinstance(parse_json_object(text, "x"), dict)
    except CheckpointError:
        pass


@given(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=100), st.binary(max_size=20))
@FILES
def test_any_safetensors_file(tmp_path: Path, header: bytes, rest: bytes) -> None:
    path = tmp_path / "model.safetensors"
    for content in (len(header).to_bytes(8, "little") + header + rest, header):
        path.write_bytes(content)
        try:
            for info in read_header(path).values():
                assert 0 <= info.begin <= info.end <= len(content)
        except CheckpointError:
            pass


OFFSETS = st.lists(st.integers(-1, 40), min_size=2, max_size=2)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4"]) | SCALARS,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": OFFSETS | JSON,
    }
)


@given(st.dictionaries(TEXT, ENTRIES | JSON, max_size=4), st.integers(0, 40))
@FILES
def test_any_safetensors_header(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    try:
        read = read_header(path)
    except CheckpointError:
        return
    assert sum(info.end - info.begin for info in read.values()) == size


@given(JSON | st.fixed_dictionaries({"weight_map": st.dictionaries(TEXT, JSON, max_size=3)}))
@FILES
def test_any_index(tmp_path: Path, index: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        read_folder(tmp_path)


@given(JSON | st.fixed_dictionaries({"pairs": st.lists(JSON, max_size=3)}))
@FILES
def test_any_catalogue(tmp_path: Path, raw: Any) -> None:
    path = tmp_path / "drafts.json"
    path.write_text(json.dumps(raw))
    try:
        entry = find_draft("Qwen/Qwen3-8B", path)
    except CheckpointError:
        return
    assert entry is not None and entry.draft


@given(TEXT)
@QUICK
def test_any_target_name(name: str) -> None:
    entry = find_draft(name)
    assert entry is None or entry.target == name
