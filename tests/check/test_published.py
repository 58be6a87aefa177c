# SPDX-License-Identifier: Apache-2.0
"""`check` against the published checkpoints, whose targets are a config.json only, and against what serving says."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from tests.check.targets import target_config
from tests.checkpoint.published import PUBLISHED, Published
from tests.checkpoint.samples import data, write_checkpoint
from vllm_dflash import plugin
from vllm_dflash.check.command import findings_of
from vllm_dflash.checkpoint import parse_config, required_tensors
from vllm_dflash.engine import activation, inspection

MUSE = next(draft for draft in PUBLISHED if draft.draft.startswith("incoai/Muse"))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    plugin.register()
    yield
    activation.deactivate()


def write(folder: Path, draft: Published, target: Published | None = None) -> tuple[Path, Path]:
    """The folders of a target (its config only) and of the draft (its config and all its tensors, as a sparse file)."""
    raw = draft.raw()
    shapes = required_tensors(parse_config(raw))
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(target_config(target or draft)))
    return folder / "target", write_checkpoint(folder / "draft", raw, shapes)


def arguments(target: Path, draft: Path, **serve: object) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=str(target), speculative_config={"method": "dflash", "model": str(draft)}, max_model_len=4096, **serve
    )


@pytest.mark.parametrize("draft", PUBLISHED, ids=lambda draft: draft.draft)
def test_a_published_draft_fits_its_target(tmp_path: Path, draft: Published) -> None:
    made = arguments(*write(tmp_path, draft))
    looked = inspection.inspect(made)
    sizes, findings = findings_of(looked, SimpleNamespace(memory=None, target_weights=None))
    assert [finding for finding in findings if finding.severity == "error"] == []
    config = made.create_engine_config(UsageContext.OPENAI_API_SERVER)
    assert looked.settings is not None and looked.draft is not None and sizes is not None
    assert looked.settings.num_speculative_tokens == config.speculative_config.num_speculative_tokens == draft.block - 1
    assert looked.draft.config.target_layer_ids == draft.taps
    # bf16 keys and values of all draft layers, and the target's attention layers without its state-space ones.
    _, kv_heads, head_dim = draft.heads
    assert sizes.draft_kv_bytes_per_token == draft.layers * 2 * kv_heads * head_dim * 2
    hybrid = draft.target.startswith(("Qwen/Qwen3.5", "Qwen/Qwen3.6", "Qwen/Qwen3.8"))
    assert sizes.state_slots == (draft.block if hybrid else 0)
    assert (sizes.state_bytes > 0) == hybrid


def test_the_published_weights_take_what_their_page_says(tmp_path: Path) -> None:
    """Qwen3.8-27B-DFlash2: 3.85 GB in bf16. Its q at 256 sequences: 1.66 GiB dense."""
    draft = PUBLISHED[0]
    looked = inspection.inspect(arguments(*write(tmp_path, draft), max_num_seqs=256, max_num_batched_tokens=8192))
    sizes, _ = findings_of(looked, SimpleNamespace(memory=None, target_weights=None))
    assert sizes is not None
    assert sizes.draft_weights == pytest.approx(3.85e9, rel=0.005)
    assert sizes.q_dense == pytest.approx(1.66 * 2**30, rel=0.005)
    assert sizes.q_sparse == 256 * 7 * 16 * 12
    assert sizes.target_weights is None and sizes.requests_that_fit is None


@pytest.mark.parametrize("name", ["dflash2-muse-glimmer-30b", "dflash1-muse-glimmer-30b-assistant"])
def test_the_shipped_configs_fit_their_target(tmp_path: Path, name: str) -> None:
    raw = data(f"{name}.config.json")
    folder = write_checkpoint(tmp_path / "draft", raw, required_tensors(parse_config(raw), vocab_size=MUSE.vocab))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(target_config(MUSE)))
    made = arguments(tmp_path / "target", folder)
    looked = inspection.inspect(made)
    _, findings = findings_of(looked, SimpleNamespace(memory=None, target_weights=None))
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert looked.settings is not None
    assert made.create_engine_config(UsageContext.OPENAI_API_SERVER).speculative_config.num_speculative_tokens == 15


def test_a_draft_of_another_published_target_is_refused_by_both(tmp_path: Path) -> None:
    drafts = {draft.target: draft for draft in PUBLISHED}
    target, folder = write(tmp_path, drafts["Qwen/Qwen3-8B"], target=drafts["Qwen/Qwen3-4B"])
    made = arguments(target, folder)
    errors = [finding for finding in inspection.inspect(made).findings if finding.severity == "error"]
    assert [error.code for error in errors] == ["hidden_size", "fc_width"]
    with pytest.raises(ValueError) as refusal:
        made.create_engine_config(UsageContext.OPENAI_API_SERVER)
    assert all(error.what in str(refusal.value) for error in errors)


def test_a_hybrid_target_on_a_small_gpu_is_told_how_many_requests_its_states_allow(tmp_path: Path) -> None:
    """qwen38-27b-rtx3090#25: 1 + K states a request thrash where they do not fit."""
    looked = inspection.inspect(arguments(*write(tmp_path, PUBLISHED[0]), max_num_seqs=64))
    _, findings = findings_of(looked, SimpleNamespace(memory=24.0, target_weights=14.0))
    (finding,) = [finding for finding in findings if finding.code == "state_slots"]
    assert "8 of them" in finding.what
    assert finding.fix.startswith("Set --max-num-seqs ")


def test_a_target_that_vllm_cannot_configure_here_is_an_error_and_the_pair_is_checked_all_the_same(
    tmp_path: Path,
) -> None:
    target, folder = write(tmp_path, PUBLISHED[2], target=PUBLISHED[3])
    raw = json.loads((target / "config.json").read_text()) | {"architectures": ["UnheardOfForCausalLM"]}
    (target / "config.json").write_text(json.dumps(raw))
    looked = inspection.inspect(arguments(target, folder))
    assert [finding.code for finding in looked.findings] == ["target", "hidden_size", "fc_width"]
    with pytest.raises(ValueError, match="UnheardOfForCausalLM"):
        arguments(target, folder).create_engine_config(UsageContext.OPENAI_API_SERVER)
