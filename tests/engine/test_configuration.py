# SPDX-License-Identifier: Apache-2.0
"""From what the user writes to the SpeculativeConfig that vLLM runs: defaults, the user's word, refusals."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.support.checkpoints import DrafterShape, Pair
from vllm_dflash import plugin
from vllm_dflash.checkpoint import CheckpointError, IncompatibleDraft
from vllm_dflash.engine import activation

Make = Callable[..., Pair]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    plugin.register()
    yield
    activation.deactivate()


def configured(pair: Pair, speculative: dict[str, Any] | None, **arguments: Any) -> Any:
    """The VllmConfig that `vllm serve` would build."""
    args = EngineArgs(
        model=str(pair.target), dtype="float32", max_model_len=256, speculative_config=speculative, **arguments
    )
    return args.create_engine_config()


@pytest.mark.parametrize(("architecture", "method"), [("dflash", "greedy"), ("dflash2", "probabilistic")])
def test_k_and_the_sampling_method_follow_from_the_checkpoint(make: Make, architecture: str, method: str) -> None:
    pair = make(DrafterShape(architecture=architecture, block_size=6))
    speculative = configured(pair, {"method": "dflash", "model": str(pair.drafter)}).speculative_config
    assert speculative.num_speculative_tokens == 5
    assert speculative.draft_sample_method == method
    assert speculative.disable_eagle_block_drop is True


def test_what_the_user_writes_wins(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    speculative = configured(
        pair,
        {
            "method": "dflash",
            "model": str(pair.drafter),
            "num-speculative-tokens": 3,
            "draft_sample_method": "greedy",
            "disable_eagle_block_drop": False,
        },
    ).speculative_config
    assert speculative.num_speculative_tokens == 3
    assert speculative.draft_sample_method == "greedy"
    assert speculative.disable_eagle_block_drop is False


def test_flags_count_as_the_users_word(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    flags = {"spec_method": "dflash", "spec_model": str(pair.drafter), "spec_tokens": 2}
    assert configured(pair, None, **flags).speculative_config.num_speculative_tokens == 2


def test_a_model_named_dflash_needs_no_method(make: Make, tmp_path: Path) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    named = tmp_path / "tiny-DFlash2"
    named.symlink_to(pair.drafter)
    speculative = configured(pair, {"model": str(named)}).speculative_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("dflash", 7)


def test_the_catalogue_names_the_drafter(make: Make, tmp_path: Path) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    catalog = tmp_path / "pairs.json"
    catalog.write_text(json.dumps({"pairs": [{"target": str(pair.target), "draft": str(pair.drafter)}]}))
    speculative = configured(
        pair, {"method": "dflash"}, additional_config={"dflash": {"catalog": str(catalog)}}
    ).speculative_config
    assert speculative.draft_model_config.model == str(pair.drafter)


def test_a_target_without_a_known_drafter_is_one_sentence(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    with pytest.raises(ValueError) as error:
        configured(pair, {"method": "dflash"})
    assert str(error.value) == (
        f'No DFlash drafter is known for {pair.target}. Name one with "model" in --speculative-config, or add the '
        'pair to a catalogue file and name that in --additional-config \'{"dflash": {"catalog": "FILE"}}\'.'
    )


def test_more_drafts_than_the_block_holds_are_refused(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    with pytest.raises(IncompatibleDraft, match="num_speculative_tokens is 8"):
        configured(pair, {"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": 8})


def test_no_drafts_at_all_are_refused_with_what_is_allowed(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    with pytest.raises(IncompatibleDraft, match=r"num_speculative_tokens is 0.*a number from 1 to 7"):
        configured(pair, {"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": 0})


def test_an_ordinary_model_as_drafter_is_one_sentence(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    with pytest.raises(ValueError) as error:
        configured(pair, {"method": "dflash", "model": str(pair.target), "num_speculative_tokens": 3})
    assert str(error.value) == (
        f"{pair.target} is an ordinary model (Qwen3ForCausalLM) and no DFlash drafter. Name a drafter that was "
        'trained for the target with "model" in --speculative-config, or leave "model" out and the catalogue is '
        "asked."
    )


def test_a_foreign_anchor_layout_is_refused_with_the_reason(make: Make, tmp_path: Path) -> None:
    """vllm#49614: a checkpoint that predicts from the anchor would draft at under one per cent without a word."""
    pair = make(DrafterShape(architecture="dflash"))
    raw = json.loads((pair.drafter / "config.json").read_text())
    raw["dflash_config"]["sample_from_anchor"] = True
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(pair.drafter / "model.safetensors")
    with pytest.raises(CheckpointError, match="sample_from_anchor"):
        configured(pair, {"method": "dflash", "model": str(tmp_path)})


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 2}])
def test_without_dflash_the_configuration_is_stocks(make: Make, speculative: dict[str, Any] | None) -> None:
    pair = make(DrafterShape(architecture="dflash"))
    ours = configured(pair, dict(speculative) if speculative else None)
    hook = EngineArgs.create_speculative_config
    EngineArgs.create_speculative_config = hook.__wrapped__
    try:
        stock = configured(pair, dict(speculative) if speculative else None)
    finally:
        EngineArgs.create_speculative_config = hook
    assert ours.compute_hash() == stock.compute_hash()
    assert repr(ours.speculative_config) == repr(stock.speculative_config)
    assert vars(ours.scheduler_config) == vars(stock.scheduler_config)
    assert not [seam for seam in activation._stock if seam.stage != "always"]


def test_pipeline_parallelism_on_v1_is_refused_with_the_reason(make: Make) -> None:
    """Stock's runner fails there in its first step: 'CPUModelRunner' object has no attribute 'drafter'."""
    pair = make(DrafterShape(architecture="dflash"))
    with pytest.raises(ValueError, match=r"pipeline parallelism \(it does not carry the tapped layers"):
        configured(pair, {"method": "dflash", "model": str(pair.drafter)}, pipeline_parallel_size=2)


@pytest.fixture
def on_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations take vLLM's V2 runner, as on a GPU."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


@pytest.mark.usefixtures("on_v2")
def test_pipeline_parallelism_on_v2_without_asynchronous_scheduling_is_refused_with_the_reason(make: Make) -> None:
    """Stock's runner fails there in a request's second step: more rows to verify than the scheduler gave it."""
    pair = make(DrafterShape(architecture="dflash2"))
    speculative = {"method": "dflash", "model": str(pair.drafter)}
    refused = r"V2 does not yet support: DFlash under pipeline parallelism without asynchronous scheduling \(the"
    # vLLM switches asynchronous scheduling off on a CPU, asked for or not.
    for asked in (None, False):
        with pytest.raises(ValueError, match=refused):
            configured(pair, speculative, pipeline_parallel_size=2, async_scheduling=asked)


@pytest.mark.usefixtures("on_v2")
def test_adaptive_verification_without_cuda_graphs_is_refused_by_stock(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    speculative = {"method": "dflash", "model": str(pair.drafter), "enable_adaptive_verification": True}
    with pytest.raises(ValueError, match="Adaptive verification requires full CUDA graphs"):
        configured(pair, speculative)


def test_xformers_stands_in_the_place_of_a_custom_backend(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    speculative = {"method": "dflash", "model": str(pair.drafter), "attention_backend": "xformers"}
    built = configured(pair, speculative).speculative_config
    custom = AttentionBackendEnum.CUSTOM
    assert built.attention_backend is custom
    from vllm_dflash.engine.xformers_backend import XFormersBackend

    assert custom.get_class() is XFormersBackend and XFormersBackend.supports_non_causal()
    custom.clear_override()
    assert pickle.loads(pickle.dumps(built)).attention_backend is custom
    assert custom.get_class() is XFormersBackend, "a process that the configuration arrives in knows the name too"
    configured(pair, None)
    assert not custom.is_overridden()


def test_xformers_where_another_plug_in_has_the_place(make: Make) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    register_backend(AttentionBackendEnum.CUSTOM, "somebody.Backend")
    try:
        with pytest.raises(ValueError, match=r"which somebody\.Backend has taken"):
            configured(pair, {"method": "dflash", "model": str(pair.drafter), "attention_backend": "XFORMERS"})
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
