# SPDX-License-Identifier: Apache-2.0
"""Every sampling feature as without speculation: at T=0 token for token, at T>0 by seeds and teacher forcing."""

import re

import pytest
import torch

from tests.engine import probes
from tests.engine.prompts import tiny_prompts
from tests.reference.target import ReferenceTarget

pytestmark = pytest.mark.engine

PATTERN = "(t3|t28|t23|t9|t27|t4|t0)+"
# At temperature 0 the tokens, text and reasons must be those of plain decoding.
GREEDY = {
    "bare": {"ignore_eos": True},
    "to the end of text": {},
    "one token": {"max_tokens": 1, "ignore_eos": True},
    "fewer tokens than drafts": {"max_tokens": 5, "ignore_eos": True},
    "logprobs": {"logprobs": 4, "ignore_eos": True},
    "prompt logprobs": {"prompt_logprobs": 2, "ignore_eos": True},
    "repetition penalty": {"repetition_penalty": 1.3, "ignore_eos": True},
    "presence penalty": {"presence_penalty": 0.8, "ignore_eos": True},
    "frequency penalty": {"frequency_penalty": 0.4, "ignore_eos": True},
    "logit bias": {"logit_bias": {9: 4.0, 28: -3.0, 3: -100.0}, "ignore_eos": True},
    "logit bias and penalty": {"logit_bias": {9: 3.0, 28: -3.0}, "repetition_penalty": 1.4, "ignore_eos": True},
    "stop string": {"stop": ["t23 t9", "t4"], "ignore_eos": True},
    "stop string kept": {"stop": ["t17"], "include_stop_str_in_output": True, "ignore_eos": True},
    "stop token": {"stop_token_ids": [9, 24], "ignore_eos": True},
    "least tokens": {"min_tokens": 20, "stop_token_ids": [28, 3, 23]},
    "bad words": {"bad_words": ["t28 t23", "t3"], "ignore_eos": True},
    "allowed tokens": {"allowed_token_ids": [3, 9, 23, 27, 28], "ignore_eos": True},
    "regular expression": {"structured_outputs": {"regex": PATTERN}, "ignore_eos": True},
    "choice": {"structured_outputs": {"choice": ["t3t28t9", "t27t4t0t17", "t3t28t23"]}},
}
# Sampling that leaves one token a row: at temperature 1 still the greedy tokens.
NARROW = {
    "top-k of one": {"temperature": 1.0, "top_k": 1, "ignore_eos": True},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-6, "ignore_eos": True},
    "min-p of one": {"temperature": 1.0, "min_p": 1.0, "ignore_eos": True},
    "cold": {"temperature": 0.011, "top_k": 1, "ignore_eos": True},
}
MAX_TOKENS = 40
MAX_MODEL_LEN = 256


def keywords(sampling: dict) -> dict:
    return {"temperature": 0, "max_tokens": MAX_TOKENS} | sampling


def texts(count: int, longest: int = 60) -> list[list[int]]:
    return [prompt[-longest:] for prompt in tiny_prompts(32)][:count]


@pytest.fixture(scope="module")
def plain(serving, trained):
    """Plain decoding of every greedy case, and of requests that end at the longest sequence."""
    pair = trained("dflash")
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, max_model_len=MAX_MODEL_LEN, max_num_seqs=32, max_num_batched_tokens=2048)
    prompts = texts(len(GREEDY))
    cases = dict(zip(GREEDY, engine.generate(prompts, [keywords(s) for s in GREEDY.values()]), strict=True))
    bare = engine.generate(texts(12), keywords({"ignore_eos": True}))
    long = engine.generate([ids[:200] for ids in long_texts()], keywords({"max_tokens": None, "ignore_eos": True}))
    return {"cases": cases, "bare": bare, "long": long}


def long_texts() -> list[list[int]]:
    return [prompt for prompt in tiny_prompts(32) if len(prompt) >= 200][:4]


@pytest.fixture(scope="module", params=["dflash", "dflash2"])
def pair(request, trained):
    return trained(request.param)


@pytest.fixture(scope="module")
def engine(plain, serving, pair):
    engine = serving.process(pair.drafter_shape)
    engine.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": 7},
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
    )
    return engine


def check_same(ours, theirs) -> None:
    assert ours.token_ids == theirs.token_ids
    assert ours.text == theirs.text
    assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    assert (ours.logprobs is None) == (theirs.logprobs is None)
    for row, expected in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        assert {index: rank for index, (_, rank) in row.items()} == {i: rank for i, (_, rank) in expected.items()}
        for index, (logprob, _) in row.items():
            assert logprob == pytest.approx(expected[index][0], abs=2e-3)


@pytest.mark.parametrize("case", GREEDY)
def test_greedy_alone(engine, plain, case):
    index = list(GREEDY).index(case)
    [output] = engine.generate([texts(len(GREEDY))[index]], keywords(GREEDY[case]))
    check_same(output, plain["cases"][case])


def test_all_greedy_cases_in_one_batch(engine, plain):
    outputs = engine.generate(texts(len(GREEDY)), [keywords(sampling) for sampling in GREEDY.values()])
    for case, output in zip(GREEDY, outputs, strict=True):
        check_same(output, plain["cases"][case])


@pytest.mark.parametrize("case", NARROW)
def test_narrow_sampling_is_greedy(engine, plain, case):
    outputs = engine.generate(texts(12), keywords(NARROW[case]))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain["bare"]]


def test_greedy_requests_beside_random_ones(engine, plain):
    sampling = [
        keywords({"ignore_eos": True} | ({"temperature": 1.0, "seed": index} if index % 2 else {}))
        for index in range(12)
    ]
    outputs = engine.generate(texts(12), sampling)
    for index in range(0, 12, 2):
        assert outputs[index].token_ids == plain["bare"][index].token_ids
    again = engine.generate(texts(12), sampling)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]


def test_up_to_the_longest_sequence(engine, plain):
    outputs = engine.generate([ids[:200] for ids in long_texts()], keywords({"max_tokens": None, "ignore_eos": True}))
    for output, expected in zip(outputs, plain["long"], strict=True):
        assert len(output.token_ids) == MAX_MODEL_LEN - 200
        assert output.token_ids == expected.token_ids


def test_logprobs_are_teacher_forced_ones(engine, pair):
    """dflash#39. Also of sampled tokens: logprobs are the target's raw ones, before temperature."""
    sampling = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0, "seed": 5, "logprobs": 3},
        {"temperature": 0.7, "seed": 6, "logprobs": 3, "top_p": 0.9},
    ]
    outputs = engine.generate(texts(3), [keywords({"ignore_eos": True} | one) for one in sampling])
    target = ReferenceTarget(pair.target)
    for output in outputs:
        start = len(output.prompt_token_ids)
        logits, _ = target.run(output.prompt_token_ids + output.token_ids)
        expected = logits[start - 1 : -1].log_softmax(-1)
        for row, token, found in zip(expected, output.token_ids, output.logprobs, strict=True):
            assert set(row.topk(3).indices.tolist()) | {token} == set(found)
            for index, (logprob, rank) in found.items():
                assert logprob == pytest.approx(float(row[index]), abs=2e-3)
                assert rank == 1 + int((row > row[index]).sum())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_outputs_obey_their_grammar(engine, temperature):
    # The end of text is left to the grammar: past it, ignore_eos would go on without one.
    engine.traces()
    outputs = engine.generate(
        texts(8), keywords({"temperature": temperature, "structured_outputs": {"regex": PATTERN}})
    )
    for output in outputs:
        assert re.fullmatch(PATTERN, output.text.replace(" ", "")), output.text
    assert sum(len(output.token_ids) for output in outputs) > 100
    speculated = [step for trace in engine.traces().values() for step in trace.verified]
    assert sum(step.accepted for step in speculated) > 0


def test_a_seed_gives_the_same_tokens_whatever_else_runs(engine):
    sampling = keywords({"temperature": 1.0, "seed": 1234, "ignore_eos": True})
    [alone] = engine.generate(texts(1), sampling)
    others = [keywords({"temperature": 0.8, "seed": index, "ignore_eos": True}) for index in range(9)]
    crowd = engine.generate(texts(10), [others[0], *others[1:4], *others[4:], sampling])
    [beside] = engine.generate([texts(10)[9]], sampling)
    assert crowd[9].token_ids == beside.token_ids
    first, second = engine.generate([texts(1)[0]] * 2, [sampling, sampling | {"seed": 1235}])
    assert first.token_ids == alone.token_ids
    assert second.token_ids != alone.token_ids


def test_several_outputs_of_one_request(engine):
    sampling = keywords({"temperature": 1.0, "seed": 3, "n": 4, "ignore_eos": True})
    outputs = engine.generate(texts(2), sampling)
    assert len(outputs) == 8
    assert all(len(output.token_ids) == MAX_TOKENS for output in outputs)
    assert len({tuple(output.token_ids) for output in outputs[:4]}) == 4
    again = engine.generate(texts(2), sampling)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]


def test_requests_without_a_seed_differ(engine):
    outputs = engine.generate([texts(1)[0]] * 6, keywords({"temperature": 1.0, "ignore_eos": True}))
    assert len({tuple(output.token_ids) for output in outputs}) == 6


def test_aborting_one_request_leaves_the_others_alone(engine, plain):
    tokens = engine.probe(probes.abort_midway, texts(6), keywords({"ignore_eos": True}), 2)
    assert 6 <= len(tokens[2]) < MAX_TOKENS
    for index, found in enumerate(tokens):
        assert found == plain["bare"][index].token_ids[: len(found)]
        assert index == 2 or len(found) == MAX_TOKENS
    again = engine.generate(texts(6), keywords({"ignore_eos": True}))
    assert [output.token_ids for output in again] == [plain["bare"][index].token_ids for index in range(6)]


def test_acceptance_was_real(engine):
    """The suite's drafter must be right often enough for accepted, recovered and bonus tokens all to occur."""
    engine.traces()
    engine.generate(texts(12), keywords({"ignore_eos": True}))
    accepted = torch.tensor([step.accepted for trace in engine.traces().values() for step in trace.verified])
    assert 0.3 < accepted.float().mean() < 6
    assert (accepted == 0).any() and (accepted == 7).any()
