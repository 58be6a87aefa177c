# SPDX-License-Identifier: Apache-2.0
"""The demo pair in `vllm serve`: /metrics before and after load, each value against what the answers themselves say."""

import time
from collections.abc import Iterator

import pytest

import vllm_dflash
from tests.metrics.expected import PREFIX, Counts, Difference, check_drafts
from tests.metrics.scrape import Scrape
from tests.support.server import Server
from vllm_dflash.checkpoint import load_draft
from vllm_dflash.checkpoint.safetensors_header import tensor_bytes
from vllm_dflash.spec_decode.outcome import FAULT_KINDS, SKIP_REASONS
from vllm_dflash.spec_decode.timing import STAGES

pytestmark = [pytest.mark.engine, pytest.mark.pair]

FIXED = {"block_length": 7}
DETAILED = ("--per-request-spec-decode-metrics", "detailed")
# Differing first words, so that no prompt starts with another's cached blocks.
PROMPTS = [
    f"{name} is a city in Europe. Its history began" for name in ("Paris", "Rome", "Vienna", "Madrid", "Oslo", "Bern")
]


def load(server: Server, workload: str | None = None, count: int = 6, tokens: int = 24) -> list[dict]:
    body = {} if workload is None else {"vllm_xargs": {"dflash.workload": workload}}
    requests = [{"prompt": PROMPTS[i % 6], "max_tokens": tokens + i, "ignore_eos": True} | body for i in range(count)]
    return server.complete_all(requests)


def scrape(server: Server) -> Scrape:
    # An answer may be read before the statistics of its last step.
    time.sleep(0.5)
    return Scrape.parse(server.metrics())


def stock_agrees(counted: Difference | Scrape) -> None:
    """vLLM's own counters, which know no workload."""
    drafted = counted.by(f"{PREFIX}draft_tokens_total", "position")
    accepted = counted.by(f"{PREFIX}accepted_tokens_total", "position")
    stock = counted.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert {str(int(position) + 1): value for position, value in stock.items()} == accepted
    assert counted.sum("vllm:spec_decode_num_draft_tokens_total") == sum(drafted.values())
    assert counted.sum("vllm:spec_decode_num_accepted_tokens_total") == sum(accepted.values())
    assert counted.sum("vllm:spec_decode_num_drafts_total") == drafted["1"]


@pytest.fixture(scope="module")
def pair(demo):
    return demo("dflash2")


@pytest.fixture(scope="module")
def server(pair) -> Iterator[Server]:
    with Server(
        pair.target, pair.drafter, *DETAILED, "--max-num-seqs", "64", options={**FIXED, "workloads": 2}
    ) as running:
        yield running


def test_what_runs_is_told_before_the_first_request(server: Server, pair) -> None:
    got = scrape(server)
    ((labels, value),) = got.samples[f"{PREFIX}info"]
    assert value == 1
    assert labels.items() >= {
        "model_name": "m",
        "engine": "0",
        "version": vllm_dflash.__version__,
        "drafter": str(pair.drafter),
        "architecture": "DFlash2DraftModel",
        "runner": "v1",
        "ops_backend": "native",
        "attention_backend": "CPU_ATTN",
    }.items()  # fmt: skip
    assert labels["vllm_version"].startswith("0.3")
    assert got.samples[f"{PREFIX}speculation_enabled"] == [({"model_name": "m", "engine": "0"}, 1.0)]
    draft = load_draft(str(pair.drafter))
    stored = sum(tensor_bytes(tensor) for tensor in draft.tensors.values())
    assert got.sum(f"{PREFIX}draft_weights_bytes") == pytest.approx(stored, rel=0.05)
    assert got.sum(f"{PREFIX}draft_q_bytes") == 64 * 7 * (8 + draft.config.selector_top_k * 12)
    assert 0 < got.sum(f"{PREFIX}draft_kv_bytes") < 2**30
    assert {at["reason"] for at, _ in got.samples[f"{PREFIX}skipped_drafts_total"]} == set(SKIP_REASONS)
    assert {at["kind"] for at, _ in got.samples[f"{PREFIX}faults_total"]} == set(FAULT_KINDS)


def test_every_metric_against_the_answers(server: Server) -> None:
    first = scrape(server)
    began = time.perf_counter()
    answers = load(server)
    seconds = time.perf_counter() - began
    counted = Difference(first, scrape(server))
    expected = Counts.of(answers)
    check_drafts(counted, expected)
    stock_agrees(counted)
    assert counted.sum("vllm:generation_tokens_total") == expected.tokens

    blocks = counted.histogram(f"{PREFIX}block_length_tokens")
    assert {length: steps for length, steps in blocks.items() if length} == expected.blocks()

    steps = counted.sum("vllm:iteration_tokens_total_count")
    took = {stage: counted.sum(f"{PREFIX}{stage}_seconds_sum") for stage in STAGES}
    times = {stage: counted.sum(f"{PREFIX}{stage}_seconds_count") for stage in STAGES}
    assert min(took.values()) > 0
    assert sum(took.values()) < seconds
    assert times["target"] >= times["verify"] > 0 and times["draft"] == times["select"] <= times["inject"]
    assert times["target"] == pytest.approx(steps, abs=2)
    longest = max(len(a["metrics"]["speculative_decoding"]["per_step_drafted"]) for a in answers)
    assert longest <= times["verify"] <= sum(expected.blocks().values())

    assert counted.by(f"{PREFIX}faults_total", "kind") == {}
    assert counted.sum(f"{PREFIX}restored_context_positions_total") == 0
    assert counted.after.sum(f"{PREFIX}speculation_enabled") == 1
    # The estimate needs some steps in which everybody decodes, and of six that come one by one there may be few.
    server.complete(PROMPTS[0], max_tokens=64, ignore_eos=True)
    assert 0.2 < scrape(server).sum(f"{PREFIX}speedup_ratio") < 8


def test_a_prompt_in_chunks_and_a_request_that_is_given_up(server: Server) -> None:
    """Neither distorts what is counted: chunks are no decoding steps, and the rest of an aborted request is not."""
    first = scrape(server)
    long = server.complete(PROMPTS[0] + " in the mist" * 250, max_tokens=8, ignore_eos=True)
    with server.client.stream(
        "POST", "/v1/completions", json={"model": "m", "prompt": PROMPTS[1], "max_tokens": 900, "stream": True}
    ) as answer:
        for _, line in zip(range(3), answer.iter_lines(), strict=False):
            assert not line or line.startswith("data:")
    time.sleep(1.0)
    counted = Difference(first, scrape(server))
    drafted = counted.by(f"{PREFIX}draft_tokens_total", "position")["1"]
    # The step that ran when the request was given up was done; vLLM's own counters leave it out.
    assert drafted - counted.sum("vllm:spec_decode_num_drafts_total") in (0, 1)
    steps = sum(Counts.of([long]).steps.values())
    assert steps < drafted < steps + 900
    blocks = counted.histogram(f"{PREFIX}block_length_tokens")
    assert blocks.get(0.0, 0.0) == 0
    assert scrape(server).by(f"{PREFIX}draft_tokens_total", "position") == counted.after.by(
        f"{PREFIX}draft_tokens_total", "position"
    )


def test_acceptance_by_workload_in_few_labels(server: Server) -> None:
    expected = {}
    for workload, label in (("chat", "chat"), ('code "x"', "code__x_"), ("third", "other"), ("fourth", "other")):
        answers = load(server, workload, count=2)
        expected.setdefault(label, []).extend(answers)
    got = scrape(server)
    for label, answers in expected.items():
        check_drafts(got, Counts.of(answers), workload=label)
    assert set(got.by(f"{PREFIX}draft_tokens_total", "workload")) == {"default", *expected}


@pytest.mark.slow  # tests/engine/test_untouched.py asks engines without a server
def test_without_the_plugin_there_is_no_metric_of_it(pair) -> None:
    with Server(pair.target, None, environment={"VLLM_PLUGINS": ""}) as server:
        server.complete(PROMPTS[0], max_tokens=4)
        text = server.metrics()
    assert "vllm:generation_tokens_total" in text and "vllm_dflash" not in text


@pytest.mark.parametrize("arguments", [(), ("ngram",)], ids=["plain", "ngram"])
@pytest.mark.slow
def test_another_method_has_no_metric_of_it(pair, arguments) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    more = ("--speculative-config", str(speculative).replace("'", '"')) if arguments else ()
    with Server(pair.target, None, *more) as server:
        server.complete(PROMPTS[0], max_tokens=4)
        text = server.metrics()
    assert "vllm:generation_tokens_total" in text and "vllm_dflash" not in text


@pytest.mark.slow
def test_metrics_can_be_switched_off(pair) -> None:
    with Server(pair.target, pair.drafter, options={"metrics": False}) as server:
        server.complete(PROMPTS[0], max_tokens=8)
        text = server.metrics()
    assert "vllm:spec_decode_num_drafts_total" in text and "vllm_dflash" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("--api-server-count", "2"), {}),
        (("--data-parallel-size", "2"), {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
        (("--tensor-parallel-size", "2"), {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
    ],
    ids=["two API servers", "two engines", "two ranks"],
)
def test_several_processes_count_once(pair, trained, arguments, environment) -> None:
    two_engines = "--data-parallel-size" in arguments
    if "--tensor-parallel-size" in arguments:
        pair = trained("dflash2")  # the demo's target has nine heads
    with Server(
        pair.target, pair.drafter, *DETAILED, *arguments, options=FIXED, environment=environment
    ) as server:
        expected = Counts.of(load(server, count=12))
        got = scrape(server)
        check_drafts(got, expected)
        stock_agrees(got)
        engines = set(got.by(f"{PREFIX}draft_tokens_total", "engine"))
        assert engines == ({"0", "1"} if two_engines else {"0"})
        assert {at["engine"] for at, _ in got.samples[f"{PREFIX}info"]} == engines
        times = {stage: got.sum(f"{PREFIX}{stage}_seconds_count") for stage in STAGES}
        assert times["target"] >= times["verify"] > 0 and times["draft"] > 0
