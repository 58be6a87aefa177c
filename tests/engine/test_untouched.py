# SPDX-License-Identifier: Apache-2.0
"""Without `"method": "dflash"` the package changes nothing: vLLM's objects stay stock's, and so does what they do."""

import pytest

from tests.engine import untouched
from tests.engine.prompts import tiny_prompts
from tests.support.engine import EngineProcess, Runner, close_all

pytestmark = pytest.mark.engine

# The two hooks that wait for a DFlash configuration. They hand everything else to stock's function.
WAITING = {
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config": True,
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": True,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Stock's V1 runner on a CPU (0.32) samples greedy requests too where a batch mixes both and drafts are verified: the
# comparison under ngram drafts keeps to greedy ones.
SAMPLING = [
    {"temperature": 0, "max_tokens": 24, "logprobs": 3},
    {"temperature": 1.0, "seed": 7, "max_tokens": 24, "logprobs": 2, "top_p": 0.9},
    {"temperature": 0.7, "seed": 8, "max_tokens": 24, "repetition_penalty": 1.2},
    {"temperature": 0, "max_tokens": 24, "presence_penalty": 0.5, "stop": ["t9"]},
]


@pytest.fixture(scope="module")
def start(plugin):
    """Processes of this module's own: the first look must come before an engine has loaded the plug-in."""
    if not plugin:
        pytest.skip("the plug-in is what is under test")
    started = []

    def process(plugin: bool, runner: Runner = "v1") -> EngineProcess:
        started.append(EngineProcess(runner=runner, plugin=plugin))
        assert started[-1].probe(untouched.remember) > 10_000
        return started[-1]

    yield process
    close_all(started)


def answers(engine, pair, **arguments):
    engine.start(pair.target, **arguments)
    prompts = [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:4]]
    greedy = [sampling for sampling in SAMPLING if sampling["temperature"] == 0]
    outputs = engine.generate(prompts, SAMPLING if not arguments.get("speculative") else greedy * 2)
    return [(output.token_ids, output.logprobs, output.text) for output in outputs]


@pytest.fixture(scope="module")
def control(start, trained):
    """A runner's process without the plug-in, and what its first engine, for plain decoding, changed itself."""
    known: dict[Runner, tuple[EngineProcess, dict[str, bool]]] = {}

    def of(runner: Runner) -> tuple[EngineProcess, dict[str, bool]]:
        if runner not in known:
            process = start(plugin=False, runner=runner)
            process.start(trained("dflash2").target)
            known[runner] = process, process.probe(untouched.changed)
        return known[runner]

    return of


def check_stock(engine, of_stock: dict[str, bool]) -> None:
    """`engine` has the plug-in; `of_stock` is what changed in a process without it that did the same."""
    ours = engine.probe(untouched.changed)
    assert {name: wraps for name, wraps in ours.items() if name not in of_stock} == WAITING
    assert engine.probe(untouched.changed_architectures) == []
    assert engine.probe(untouched.plugin_classes_in_use) == []


def test_other_engines_are_stock(start, control, trained):
    """Plain decoding, then ngram: an engine after an ngram engine fails in stock's V1 on a CPU."""
    pair, engine, (stock, of_stock) = trained("dflash2"), start(plugin=True), control("v1")
    for speculative in ({}, NGRAM):
        assert answers(engine, pair, speculative=speculative) == answers(stock, pair, speculative=speculative)
        check_stock(engine, stock.probe(untouched.changed) if speculative else of_stock)
        for process in (engine, stock):
            count, ours = process.probe(untouched.metrics)
            assert count > 20 and ours == []


@pytest.mark.parametrize(
    ("runner", "replaced"),
    [
        ("v1", "vllm.v1.worker.gpu_model_runner:DFlashProposer"),
        ("v2", "vllm.v1.worker.gpu.model_runner:init_speculator"),
    ],
    ids=["v1", "v2"],
)
def test_an_engine_after_a_dflash_engine_is_stock_again(start, control, trained, runner, replaced):
    pair, engine = trained("dflash2"), start(plugin=True, runner=runner)
    engine.start(pair.target, pair.drafter)
    during = engine.probe(untouched.changed)
    assert during.items() > WAITING.items()
    assert replaced in during
    assert "DFlash2DraftModel" in engine.probe(untouched.changed_architectures)
    engine.start(pair.target)
    check_stock(engine, control(runner)[1])
