# SPDX-License-Identifier: Apache-2.0
"""T=1: the first three tokens after a fixed prompt are distributed as the target's own (vllm#54282, vllm#47386).

4,000 seeded requests against the exact probabilities of the target, by chi-square. The same test, on the same
engine, must fail when the acceptance test sees q times 1.2: the reference's verification takes the operation's place
for that, and once with the right q to show that taking the place is not what makes it fail.
"""

import pytest
import torch

from tests.engine import probes
from tests.support.distribution import compare, exact_distribution, sampling_rule

pytestmark = pytest.mark.engine

# The interpreter under V2 is slow; there fewer requests look for a wrong q that is further from the right one.
REQUESTS = {"v1": 4000, "v2": 800}
WRONG_Q = {"v1": 1.2, "v2": 3.0}
LOSSLESS, LOSSY = 1e-3, 1e-6
PROMPT = [3, 28, 23, 9, 27, 4, 20, 11]
RULES = {
    "cool": {"temperature": 0.7},
    "nucleus": {"temperature": 0.9, "top_p": 0.7},
    "top of a warm one": {"temperature": 1.4, "top_k": 6},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.9},
    "least probable": {"temperature": 1.3, "min_p": 0.2},
    "biased": {"temperature": 1.0, "logit_bias": {9: 1.5, 28: -2.0, 4: 1.0}, "presence_penalty": 0.4},
}
BOTH = pytest.mark.parametrize("architecture", ["dflash", "dflash2"])


@pytest.fixture(scope="module")
def engine_of(serving, trained):
    def start(architecture: str, **speculative):
        pair = trained(architecture)
        engine = serving.process(pair.drafter_shape)
        engine.start(
            pair.target,
            pair.drafter,
            speculative={"num_speculative_tokens": 3} | speculative,
            max_num_seqs=128,
            # Stock on a CPU fails where a seeded prompt is cut in chunks; here none is.
            max_num_batched_tokens=4096,
        )
        return engine, pair

    return start


@pytest.fixture(scope="module")
def joint(trained):
    return exact_distribution(trained("dflash").target, PROMPT, 3)


def sampled(engine, rules: list[dict]) -> torch.Tensor:
    """Tokens [requests, 3] of seeded requests that sample by `rules`, in turn, all submitted together."""
    count = REQUESTS[engine.runner] * len(rules)
    sampling = [
        {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "seed": index, "detokenize": False}
        | rules[index % len(rules)]
        for index in range(count)
    ]
    outputs = engine.generate([PROMPT] * count, sampling)
    return torch.tensor([output.token_ids for output in outputs])


def check(engine, joint, lossless: bool) -> None:
    results = compare(sampled(engine, [{}]), joint)
    accepted = [step.accepted for trace in engine.traces().values() for step in trace.verified]
    print(f"mean accepted {sum(accepted) / len(accepted):.2f};", results)
    assert sum(accepted) > 0.2 * len(accepted), "hardly a draft was accepted; the test would show little"
    least = min(chance for _, chance in results.values())
    if lossless:
        assert least > LOSSLESS, results
    else:
        assert least < LOSSY, results


@BOTH
def test_sampled_tokens_are_the_targets(engine_of, joint, architecture):
    engine, _ = engine_of(architecture)
    check(engine, joint, lossless=True)


@pytest.mark.parametrize(
    ("architecture", "method"), [("dflash", "probabilistic"), ("dflash2", "greedy")], ids=lambda value: value
)
def test_the_other_way_of_drafting_is_lossless_too(engine_of, joint, architecture, method):
    engine, _ = engine_of(architecture, draft_sample_method=method)
    check(engine, joint, lossless=True)


@BOTH
def test_processed_rows_are_the_targets(engine_of, architecture):
    """Temperature, top-k, top-p, penalties, min_p and logit_bias shape p row by row, in batches that mix them.

    vllm#42744: with stock's guard lifted alone, min_p and logit_bias would reach the bonus tokens only.
    """
    engine, pair = engine_of(architecture)
    tokens = sampled(engine, list(RULES.values()))
    for index, (name, rule) in enumerate(RULES.items()):
        joint = exact_distribution(pair.target, PROMPT, 3, sampling_rule(**rule))
        results = compare(tokens[index :: len(RULES)], joint)
        print(name, results)
        assert min(chance for _, chance in results.values()) > LOSSLESS, (name, results)


@BOTH
def test_a_wrong_q_is_noticed(serving, engine_of, joint, architecture):
    serving.needs_plugin("the operation that is replaced")
    engine, _ = engine_of(architecture)
    try:
        engine.probe(probes.replace_rejection, 1.0)
        check(engine, joint, lossless=True)
        engine.probe(probes.replace_rejection, WRONG_Q[engine.runner])
        check(engine, joint, lossless=False)
    finally:
        engine.probe(probes.restore_rejection)
