# SPDX-License-Identifier: Apache-2.0
"""Random mixes of sampling features: at T=0 plain decoding's tokens and logprobs, at T>0 the target's distribution.

vllm#42744: min_p and logit_bias are among them, which stock refuses together with speculation.
"""

import random

import pytest
import torch

from tests.engine.prompts import tiny_prompts
from tests.engine.test_sampling import check_same
from tests.support.distribution import compare, exact_distribution, sampling_rule

pytestmark = pytest.mark.engine

VOCABULARY = 32
FEATURES = {
    "repetition_penalty": lambda pick: pick.choice((0.8, 1.2, 1.5)),
    "presence_penalty": lambda pick: pick.choice((-0.5, 0.6)),
    "frequency_penalty": lambda pick: pick.choice((-0.3, 0.5)),
    "logit_bias": lambda pick: {pick.randrange(3, VOCABULARY): pick.uniform(-4, 4) for _ in range(3)},
    "min_p": lambda pick: pick.choice((0.02, 0.1, 0.3)),
    "allowed_token_ids": lambda pick: sorted(pick.sample(range(3, VOCABULARY), 20)),
    "min_tokens": lambda pick: pick.choice((1, 2, 12)),
    "bad_words": lambda pick: [f"t{pick.randrange(3, VOCABULARY)} t{pick.randrange(3, VOCABULARY)}" for _ in range(6)],
    "stop": lambda pick: [f"t{pick.randrange(3, VOCABULARY)} t{pick.randrange(3, VOCABULARY)}"],
    "stop_token_ids": lambda pick: [pick.randrange(3, VOCABULARY)],
    "logprobs": lambda pick: pick.choice((0, 3)),
    "prompt_logprobs": lambda pick: 2,
    "max_tokens": lambda pick: pick.randint(1, 50),
    "ignore_eos": lambda pick: True,
}
MIXES = 64
PROMPT = [3, 28, 23, 9, 27, 4, 20, 11]
REQUESTS = 2500
LOSSLESS = 1e-3
# min_tokens keeps the end of text out too, whatever ignore_eos says: it is not among the allowed ones.
SAMPLED = {
    "bias and min_p": {"temperature": 1.0, "logit_bias": {9: 2.0, 27: -3.0, 14: 1.5}, "min_p": 0.05},
    "min_p, top_k, warm": {"temperature": 1.5, "min_p": 0.1, "top_k": 9},
    "bias, penalties, top_p": {
        "temperature": 0.8,
        "logit_bias": {3: 1.0, 20: 2.5},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "top_p": 0.85,
    },
    "allowed, least tokens, min_p": {
        "temperature": 1.1,
        "allowed_token_ids": [3, 4, 9, 11, 14, 17, 20, 23, 25, 27, 28],
        "min_tokens": 3,
        "stop_token_ids": [9, 28],
        "min_p": 0.02,
    },
    "presence alone with bias": {"temperature": 0.9, "presence_penalty": 1.1, "logit_bias": {28: -1.5, 5: 2.0}},
}


def random_mix(seed: int) -> dict:
    pick = random.Random(seed)
    names = pick.sample(sorted(FEATURES), pick.randint(1, 6))
    mix = {"temperature": 0, "max_tokens": 40} | {name: FEATURES[name](pick) for name in names}
    if "allowed_token_ids" in mix:
        # A bias cannot bring a forbidden token back, and a word made of forbidden tokens is no test.
        mix["allowed_token_ids"] = sorted({*mix["allowed_token_ids"], 2})
    mix["min_tokens"] = min(mix.get("min_tokens", 0), mix["max_tokens"])
    return mix


@pytest.fixture(scope="module")
def mixes() -> list[dict]:
    return [random_mix(seed) for seed in range(MIXES)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    texts = [prompt[-60:] for prompt in tiny_prompts(VOCABULARY)]
    return [texts[index % len(texts)] for index in range(MIXES)]


@pytest.fixture(scope="module")
def plain(serving, trained, mixes, prompts):
    pair = trained("dflash")
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, max_num_seqs=64, max_num_batched_tokens=4096)
    return engine.generate(prompts, mixes)


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_greedy_mixes_in_one_batch(serving, trained, plain, mixes, prompts, architecture):
    pair = trained(architecture)
    engine = serving.process(pair.drafter_shape)
    engine.start(pair.target, pair.drafter, max_num_seqs=64, max_num_batched_tokens=4096)
    engine.traces()
    for mix, ours, theirs in zip(mixes, engine.generate(prompts, mixes), plain, strict=True):
        try:
            check_same(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"{mix}: {error}") from error
    assert sum(step.accepted for trace in engine.traces().values() for step in trace.verified) > MIXES


def test_sampled_mixes_are_the_targets(serving, trained):
    """Each mix against its exact distribution, in batches that hold all of them."""
    pair = trained("dflash2")
    engine = serving.process(pair.drafter_shape)
    engine.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": 3},
        max_num_seqs=128,
        max_num_batched_tokens=4096,
    )
    rules = list(SAMPLED.values())
    sampling = [
        {"max_tokens": 3, "ignore_eos": True, "seed": index, "detokenize": False} | rules[index % len(rules)]
        for index in range(REQUESTS * len(rules))
    ]
    outputs = engine.generate([PROMPT] * len(sampling), sampling)
    tokens = torch.tensor([output.token_ids for output in outputs])
    for index, (name, rule) in enumerate(SAMPLED.items()):
        joint = exact_distribution(pair.target, PROMPT, 3, sampling_rule(**rule, prompt=PROMPT))
        results = compare(tokens[index :: len(rules)], joint)
        assert min(chance for _, chance in results.values()) > LOSSLESS, (name, results)
