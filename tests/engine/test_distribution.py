# SPDX-License-Identifier: Apache-2.0
"""T=1: the first three tokens after a fixed prompt are distributed as the target's own (vllm#54282, vllm#47386).

4,000 seeded requests against the exact probabilities of the target, by chi-square. The same test, on the same
engine, must fail when the acceptance test sees q times 1.2: the reference's verification takes the operation's place
for that, and once with the right q to show that taking the place is not what makes it fail.
"""

import pytest
import torch

from tests.engine import probes
from tests.support.distribution import compare, exact_distribution

pytestmark = pytest.mark.engine

REQUESTS = 4000
LOSSLESS, LOSSY = 1e-3, 1e-6
PROMPT = [3, 28, 23, 9, 27, 4, 20, 11]
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


def sampled(engine, first_seed: int = 0) -> torch.Tensor:
    sampling = [
        {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "seed": first_seed + index, "detokenize": False}
        for index in range(REQUESTS)
    ]
    outputs = engine.generate([PROMPT] * REQUESTS, sampling)
    return torch.tensor([output.token_ids for output in outputs])


def check(engine, joint, lossless: bool, first_seed: int = 0) -> None:
    results = compare(sampled(engine, first_seed), joint)
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
def test_a_wrong_q_is_noticed(serving, engine_of, joint, architecture):
    serving.needs_plugin("the operation that is replaced")
    engine, _ = engine_of(architecture)
    try:
        engine.probe(probes.replace_rejection, 1.0)
        check(engine, joint, lossless=True)
        engine.probe(probes.replace_rejection, 1.2)
        check(engine, joint, lossless=False)
    finally:
        engine.probe(probes.restore_rejection)
