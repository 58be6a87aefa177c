# SPDX-License-Identifier: Apache-2.0
"""The short form of `make soak`. vllm#55279, vllm#52816: engines died, or drafted ids outside the vocabulary, only
after thousands of sampling steps."""

import pytest

from tests.soak.check import soak_pair

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("architecture", "steps"), [("dflash", 500), ("dflash2", 1200)])
def test_random_traffic(trained, architecture, steps):
    report, broken = soak_pair(trained(architecture), "v1", steps, seed=1)
    assert not broken
    assert report.steps >= steps


@pytest.mark.slow
def test_random_traffic_on_v2(trained):
    _, broken = soak_pair(trained("dflash2"), "v2", steps=400, seed=2)
    assert not broken
