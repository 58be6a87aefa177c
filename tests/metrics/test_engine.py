# SPDX-License-Identifier: Apache-2.0
"""Both runners in an engine of one process: what is counted against what the scheduler saw of every request."""

from collections import Counter

import pytest

from tests.engine.prompts import tiny_prompts
from tests.engine.test_faults import raise_in, restore_methods
from tests.metrics.expected import PREFIX, Counts, Difference, check_drafts
from tests.metrics.scrape import Scrape
from vllm_dflash.spec_decode.timing import STAGES

pytestmark = pytest.mark.engine


def exposition(llm) -> str:
    """Runs in the engine's process."""
    from prometheus_client import generate_latest

    return generate_latest().decode()


@pytest.fixture(scope="module")
def engine(plugin, processes, pytestconfig):
    if not plugin:
        pytest.skip("the plug-in's own metrics")
    return lambda runner: processes(runner=runner, plugin=True)


def scrape(engine) -> Scrape:
    return Scrape.parse(engine.probe(exposition))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_counts_are_those_of_the_scheduler(engine, trained, runner) -> None:
    """Prompts in chunks, a batch that shrinks, two workloads; then the engine starts anew and goes on counting."""
    pair = trained("dflash2")
    engine = engine(runner)
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=70)[:8]
    names = ["chat", "code"] * 4
    sampling = [
        {
            "temperature": index % 2,
            "seed": index,
            "max_tokens": 6 + 2 * index,
            "ignore_eos": True,
            "extra_args": {"dflash": {"workload": name}},
        }
        for index, name in enumerate(names)
    ]
    before = Scrape({})
    for start in range(2):
        engine.start(
            pair.target,
            pair.drafter,
            speculative={"num_speculative_tokens": 7},
            max_num_seqs=6,
            max_num_batched_tokens=128,
            enable_prefix_caching=False,
            additional_config={"dflash": {"block_length": 7}},
        )
        engine.traces()
        if start == 0:
            before = scrape(engine)
        outputs = engine.generate(prompts, sampling)
        traces = engine.traces()
        after = scrape(engine)
        counted = Difference(before, after)
        for name in ("chat", "code"):
            own = [traces[o.request_id] for o, of in zip(outputs, names, strict=True) if of == name]
            steps = Counter((step.scheduled, step.accepted) for trace in own for step in trace.verified)
            check_drafts(counted, Counts(steps), workload=name)
        assert any(trace.unfinished_chunks for trace in traces.values()), "no prompt came in chunks"
        blocks = counted.histogram(f"{PREFIX}block_length_tokens")
        verified = sum(len(trace.verified) for trace in traces.values())
        assert blocks == {7.0: verified}
        for stage in STAGES:
            assert counted.sum(f"{PREFIX}{stage}_seconds_count") > 0, stage
            assert counted.sum(f"{PREFIX}{stage}_seconds_sum") > 0, stage
        ((labels, _),) = after.samples[f"{PREFIX}info"]
        assert labels["runner"] == runner and labels["architecture"] == "DFlash2DraftModel"
        assert after.sum(f"{PREFIX}draft_kv_bytes") > 0 and after.sum(f"{PREFIX}draft_weights_bytes") > 0
        before = after


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_faults_are_counted_and_so_is_the_switch_off(engine, trained, runner) -> None:
    pair = trained("dflash2")
    engine = engine(runner)
    fixed = {"dflash": {"block_length": 7}}
    options = {"additional_config": fixed, "enable_prefix_caching": False}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **options)
    engine.traces()
    prompts = [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:4]]
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}

    # Fifteen prompts of 40 tokens in steps of 512; one request wants no drafts.
    before = scrape(engine)
    short = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    without = short | {"extra_args": {"dflash": {"max_draft_tokens": 0}}}
    engine.generate((prompts * 4)[:15], [without] + [short] * 14)
    skipped = Difference(before, scrape(engine)).by(f"{PREFIX}skipped_drafts_total", "reason")
    assert skipped == {"prompt": 1.0, "request": 5.0}
    engine.traces()

    for first, count, faults, enabled in (
        (2, 2, {"exception": 2.0}, 1),
        (1, 10**6, {"exception": 3.0, "disabled": 1.0}, 0),
    ):
        before = scrape(engine)
        engine.probe(raise_in, "forward", first, count)
        engine.generate(prompts, greedy)
        after = scrape(engine)
        engine.probe(restore_methods)
        counted = Difference(before, after)
        assert counted.by(f"{PREFIX}faults_total", "kind") == faults
        assert counted.by(f"{PREFIX}skipped_drafts_total", "reason")["fault"] >= 4 * faults["exception"]
        steps = Counter((s.scheduled, s.accepted) for trace in engine.traces().values() for s in trace.verified)
        check_drafts(counted, Counts(steps))
        assert after.sum(f"{PREFIX}speculation_enabled") == enabled


def test_an_engine_of_another_kind_has_no_metric_of_it(engine, trained) -> None:
    pair = trained("dflash2")
    engine = engine("v1")
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 3})
    engine.generate([[5, 6, 7]], {"temperature": 0, "max_tokens": 4})
    assert "vllm_dflash:" in engine.probe(exposition)
    engine.start(pair.target)
    engine.generate([[5, 6, 7]], {"temperature": 0, "max_tokens": 4})
    assert "vllm_dflash:" not in engine.probe(exposition)
