# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from tests.reference.config import default_layer_ids, read_config
from tests.support.checkpoints import DrafterShape, TargetShape, make_drafter


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (28, 1, (14,)), (9, 3, (1, 4, 6))],
)
def test_default_layer_ids(num_target_layers, num_draft_layers, expected):
    assert default_layer_ids(num_target_layers, num_draft_layers) == expected


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_both_dialects_say_the_same(tmp_path, architecture):
    shape = DrafterShape(
        architecture=architecture,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=6,
        causal=False,
        output_multiplier=0.5,
        final_logit_softcapping=4.0,
    )
    ours = make_drafter(tmp_path / "z-lab", shape)
    theirs = make_drafter(tmp_path / "speculators", replace(shape, dialect="speculators"))
    assert read_config(ours, 4) == read_config(theirs, 4)


def test_causality_by_layer_type(tmp_path):
    shape = DrafterShape(layer_types=("sliding_attention", "full_attention"), sliding_window=6)
    config = read_config(make_drafter(tmp_path, shape), 4)
    assert config.causal == (True, False)
    assert config.windows == (6, None)


def test_top_level_causality_wins_over_the_nested_key(tmp_path):
    config = read_config(make_drafter(tmp_path, DrafterShape(is_causal=True, causal=False)), 4)
    assert config.causal == (True, True)


def test_window_of_all_layers(tmp_path):
    shape = DrafterShape(use_swa=True, swa_window_size=5, sliding_window=9)
    config = read_config(make_drafter(tmp_path, shape), 4)
    assert config.windows == (5, 5)
    assert config.causal == (False, False)


def test_defaults_of_absent_keys(tmp_path):
    shape = DrafterShape(rope_theta=None, block_size=None)
    assert read_config(make_drafter(tmp_path / "z-lab", shape), 4).block_size == 16
    config = read_config(make_drafter(tmp_path / "speculators", replace(shape, dialect="speculators")), 4)
    assert config.block_size == 8
    assert config.rope == {"rope_type": "default", "rope_theta": 1e6}
    assert config.draft_vocab_size == TargetShape().vocab_size
