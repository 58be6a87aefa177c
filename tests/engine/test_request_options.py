# SPDX-License-Identifier: Apache-2.0
"""Options of one request: mixed with others in one batch (vllm#55412), and refused by the front end where bad."""

import json

import httpx
import pytest

from examples.demo.server import Server
from tests.engine import probes
from tests.engine.drafts import check_drafts
from tests.engine.prompts import tiny_prompts
from tests.support.engine import EngineError

pytestmark = pytest.mark.engine

K = 7
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 40, "ignore_eos": True}
CAPS = [None, 0, 3, 1, K, 100, 0, 2]


def capped(sampling: dict, cap: int | None) -> dict:
    return sampling if cap is None else sampling | {"extra_args": {"dflash": {"max_draft_tokens": cap}}}


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_a_mixed_batch_keeps_its_tokens_and_each_request_its_cap(serving, trained, architecture):
    """vllm#55412: speculation off, or shorter, for some requests of a batch, greedy ones exact."""
    pair = trained(architecture)
    prompts = [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[: len(CAPS)]]
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target)
    plain = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K})
    outputs = engine.generate(prompts, [capped(GREEDY, cap) for cap in CAPS])
    traces = engine.traces()
    assert [output.token_ids for output in outputs] == plain
    for output, cap in zip(outputs, CAPS, strict=True):
        # On V2 a block is always whole, and the cap holds for what is verified of it.
        longest = max((step.scheduled for step in traces[output.request_id].verified), default=0)
        assert longest == min(K, K if cap is None else cap)
    steps = {cap: len(traces[output.request_id].steps) for output, cap in zip(outputs, CAPS, strict=True)}
    assert steps[0] == 39 and steps[None] < 30


def test_where_nobody_wants_drafts_none_are_computed_and_context_is_still_written(serving, trained):
    """vllm#49164: no draft forward at all, and the next request on the same prefix drafts from all of its context."""
    pair = trained("dflash2")
    prompts = [prompt[-80:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:3]]
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K})
    engine.probe(probes.count_forwards)
    off = engine.generate(prompts, capped(GREEDY, 0))
    counts = engine.probe(probes.forward_counts)
    assert sum(step["drafting"] for step in counts) > 100 and not any(any(step["drafter"]) for step in counts)
    engine.traces()
    turns = [output.prompt_token_ids + output.token_ids for output in off]
    outputs = engine.generate(turns, GREEDY)
    assert engine.counters()["prefix_cache_hits"] >= 3 * 96
    assert check_drafts(pair, outputs, engine.traces(), K) > 10


def test_a_request_without_drafts_does_not_change_its_neighbours_at_temperature_1(serving, trained):
    """Seeded requests draw the same tokens whether their neighbours speculate or not."""
    pair = trained("dflash2")
    prompts = [prompt[-40:] for prompt in tiny_prompts(pair.target_shape.vocab_size)[:4]]
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": K})
    together = engine.generate(prompts, SEEDED)
    mixed = engine.generate(prompts, [capped(SEEDED, cap) for cap in (None, 0, None, 0)])
    assert [mixed[i].token_ids for i in (0, 2)] == [together[i].token_ids for i in (0, 2)]


def test_a_bad_value_is_a_value_error_that_names_the_field(serving, trained):
    pair = trained("dflash2")
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter)
    message = engine.probe("tests.engine.test_request_options:refusal", {"dflash": {"max_draft_tokens": -1}})
    assert "dflash.max_draft_tokens: Input should be greater than or equal to 0 (given: -1)" in message
    assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with pytest.raises(EngineError, match=r"vllm_xargs\.dflash\.workload"):
        engine.generate([[5, 6, 7]], GREEDY | {"extra_args": {"dflash.workload": ""}})


def refusal(llm, extra_args: dict) -> str:
    """Runs in the engine's process: the message of the ValueError."""
    from vllm import SamplingParams, TokensPrompt

    try:
        llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7]), SamplingParams(extra_args=extra_args), use_tqdm=False)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was accepted")


@pytest.fixture(scope="module")
def http(make_served, tmp_path_factory):
    """A client of `vllm serve` with a tiny pair."""
    pair = make_served
    log = tmp_path_factory.mktemp("server") / "server.log"
    speculative = json.dumps({"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": K})
    arguments = ["--max-model-len", "512", "--dtype", "float32", "--served-model-name", "tiny"]
    arguments += ["--max-num-seqs", "8", "--speculative-config", speculative]
    arguments += ["--additional-config", json.dumps({"dflash": {"block_length": K}})]
    arguments += ["--per-request-spec-decode-metrics", "detailed"]
    with Server(pair.target, "tiny", log, arguments) as server, httpx.Client(
        base_url=server.url, timeout=120, trust_env=False
    ) as client:
        yield client


@pytest.fixture(scope="module")
def make_served(trained, plugin):
    if not plugin:
        pytest.skip("the plug-in's own options")
    return trained("dflash2")


PROMPT = "t3 t9 t23 t17 t4 t3 t9"
ENDPOINTS = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 24},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 24},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24},
}


def ask(http: httpx.Client, endpoint: str, xargs: dict) -> httpx.Response:
    return http.post(endpoint, json={"model": "tiny", "temperature": 0, "vllm_xargs": xargs} | ENDPOINTS[endpoint])


def drafts(http: httpx.Client) -> float:
    """vllm:spec_decode_num_draft_tokens_total so far."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:spec_decode_num_draft_tokens_total"))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_options_over_http_in_each_spelling(http, endpoint):
    before = drafts(http)
    plain = ask(http, endpoint, {})
    assert plain.status_code == 200 and drafts(http) > before
    for xargs in (
        {"dflash": {"max_draft_tokens": 0, "workload": "test"}},
        {"dflash": '{"max_draft_tokens": 0}'},
        {"dflash.max_draft_tokens": 0, "session_id": "a"},
    ):
        before = drafts(http)
        answer = ask(http, endpoint, xargs)
        assert answer.status_code == 200, answer.text
        assert drafts(http) == before


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "xargs, field",
    [
        ({"dflash": {"max_draft_tokens": -1}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_draft_tokens": True}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_drafts": 3}}, "dflash.max_drafts"),
        ({"dflash.max_draft_tokens": "many"}, "dflash.max_draft_tokens"),
        ({"dflash": "off"}, "dflash"),
    ],
)
def test_a_bad_value_is_http_400_that_names_the_field(http, endpoint, xargs, field):
    answer = ask(http, endpoint, xargs)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert f"{field}: " in error["message"]
    if endpoint != "/v1/messages":
        assert error["param"] == f"vllm_xargs.{field}"
    assert http.get("/health").status_code == 200
