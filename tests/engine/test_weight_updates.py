# SPDX-License-Identifier: Apache-2.0
"""New weights for the drafter of a running engine, by vLLM's own calls for trainers: drafts are the new weights'.

Weights that do not load are a fault that is counted, told, and raised to the trainer; the engine lives.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import LoadConfig, WeightTransferConfig

from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.engine.test_faults import state
from tests.support import weight_transfer
from tests.support.checkpoints import DrafterShape
from tests.support.engine import EngineError
from tests.support.engine_process import drafter
from vllm_dflash.spec_decode.acceptance import NEWCOMERS

pytestmark = pytest.mark.engine

K = 7
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}


def update(llm, *chunks: dict) -> None:
    llm.collective_rpc("start_draft_weight_update")
    for chunk in chunks:
        llm.collective_rpc("update_weights", args=(chunk,))
    llm.collective_rpc("finish_weight_update")


def record(llm) -> float:
    """Verified requests that the controller's record of acceptance amounts to."""
    return drafter(llm).lengths.planner.controller.acceptance.record


@pytest.fixture(scope="module")
def case(serving, trained, tmp_path_factory):
    """A running engine, its pair, that pair with other weights, and prompts."""
    serving.needs_plugin("drafters with new weights")
    pair = trained("dflash2")
    directory = tmp_path_factory.mktemp("updated")
    other = replace(pair, drafter=directory / "drafter")
    shutil.copytree(pair.drafter, other.drafter)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(pair.drafter / "model.safetensors")
    noisy = {name: one * (1 + 0.2 * torch.randn(one.shape, generator=generator)) for name, one in weights.items()}
    save_file(noisy, other.drafter / "model.safetensors")
    engine = serving.process(pair.drafter_shape)

    def start(block_length: int | str = K):
        engine.start(
            pair.target,
            pair.drafter,
            speculative={"num_speculative_tokens": K},
            additional_config={"dflash": {"metrics": False, "block_length": block_length}},
            enable_prefix_caching=False,
            weight_transfer_config=WeightTransferConfig(backend="file"),
            worker_extension_cls=f"{weight_transfer.__name__}.Registered",
        )
        return engine

    return start, pair, other, [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:4]]


@pytest.mark.parametrize("parts", [(None,), (0, 1)], ids=["at once", "in two parts"])
def test_drafts_are_those_of_the_new_weights(case, parts):
    start, pair, other, prompts = case
    engine = start()
    before = engine.generate(prompts, GREEDY)
    assert check_drafts(pair, before, engine.traces(), K) > 20
    engine.probe(update, *({"path": str(other.drafter / "model.safetensors"), "part": part} for part in parts))
    after = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in after] == [output.token_ids for output in before]
    traces = engine.traces()
    assert check_drafts(other, after, traces, K) > 20
    with pytest.raises(AssertionError, match="anchor at"):
        check_drafts(pair, after, traces, K)
    assert engine.probe(state) == ({}, True)


def test_the_record_of_the_old_weights_counts_for_little(case):
    start, _, other, prompts = case
    engine = start("auto")
    engine.generate(prompts * 4, GREEDY | {"max_tokens": 64})
    before = engine.probe(record)
    engine.probe(update, {"path": str(other.drafter / "model.safetensors"), "part": None})
    assert engine.probe(record) <= NEWCOMERS < before


def test_a_drafter_that_starts_without_weights_gets_them_later(serving, make):
    """Before its first step, in two parts; what the checkpoint keeps outside its weights is there from the start."""
    serving.needs_plugin("drafters with new weights")
    shape = DrafterShape(architecture="dflash2", mask_embedding="tensor")
    pair = make(shape)
    engine = serving.process(shape)
    engine.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": K, "draft_load_config": LoadConfig(load_format="dummy")},
        weight_transfer_config=WeightTransferConfig(backend="file"),
        worker_extension_cls=f"{weight_transfer.__name__}.Registered",
    )
    engine.probe(update, *({"path": str(pair.drafter / "model.safetensors"), "part": part} for part in (0, 1)))
    outputs = engine.generate([prompt[-40:] for prompt in tiny_prompts(128)[:4]], GREEDY)
    assert check_drafts(pair, outputs, engine.traces(), K) > 20


def test_weights_that_do_not_load_are_counted_and_the_engine_lives(case, tmp_path):
    start, _, _, prompts = case
    engine = start()
    before = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    broken = tmp_path / "broken.safetensors"
    save_file({"layers.0.self_attn.q_proj.weight": torch.zeros(3, 5)}, broken)
    with pytest.raises(EngineError):
        engine.probe(update, {"path": str(broken)})
    faults, enabled = engine.probe(state)
    assert faults == {"load": 1} and enabled
    assert "New weights for the DFlash drafter could not be loaded (RuntimeError:" in engine.printed()
    # vLLM leaves such a layer without weights: the drafter fails, three times, and the target goes on alone.
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == before
    assert engine.probe(state) == ({"load": 1, "exception": 3, "disabled": 1}, False)
