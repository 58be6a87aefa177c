# SPDX-License-Identifier: Apache-2.0
"""Options and fixtures of every test: who serves, shared engine processes, checkpoints made once a session."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import DrafterShape, Pair, TargetShape, make_drafter, make_target, with_one_k_norm
from tests.support.engine import Processes, close_all
from tests.support.pairs import TRAINED, demo_pair, trained_pair
from tests.support.serving import Serving

# Tests share two cores with the engines they start, and with another test's: one thread each, on any core.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-dflash")
    group.addoption(
        "--serving",
        choices=("plugin", "stock"),
        default="plugin",
        help="who serves the drafters under test; stock (the plug-in not loaded) judges the suites themselves",
    )
    group.addoption("--runner", choices=("v1", "v2"), default="v1", help="vLLM's model runner (v2: interpreted)")
    group.addoption(
        "--asynchronous", action="store_true", help="with --runner v2: schedule asynchronously, as on a GPU"
    )
    group.addoption(
        "--demo-pair", type=Path, default=Path(".demo"), help="folder of target/ and drafter/ (make demo-pair)"
    )


@pytest.fixture(scope="session")
def plugin(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--serving") == "plugin"


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    close_all(list(made.running.values()))


@pytest.fixture(autouse=True, scope="module")
def few_processes(processes: Processes) -> Iterator[None]:
    """A module leaves three at most to the next one."""
    yield
    processes.keep(3)


@pytest.fixture(scope="session")
def serving(pytestconfig: pytest.Config, plugin: bool, processes: Processes) -> Serving:
    return Serving(
        plugin, pytestconfig.getoption("--runner"), processes, pytestconfig.getoption("--asynchronous")
    )


@pytest.fixture(scope="session")
def served(plugin: bool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pair], Pair]:
    """A pair as the tests' server can compute it: stock on a CPU needs one k_norm in all layers."""
    root = tmp_path_factory.mktemp("served")
    return lambda pair: pair if plugin else with_one_k_norm(pair, root / pair.drafter.as_posix().strip("/"))


@pytest.fixture(scope="session")
def make(
    served: Callable[[Pair], Pair], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[DrafterShape, TargetShape], Pair]:
    """Writes a random pair; a target of one shape is written once."""
    root = tmp_path_factory.mktemp("pairs")
    targets: dict[TargetShape, Path] = {}
    drafters: dict[tuple[DrafterShape, TargetShape], Path] = {}

    def pair(drafter: DrafterShape, target: TargetShape | None = None) -> Pair:
        target = target or TargetShape()
        if target not in targets:
            targets[target] = make_target(root / f"target-{len(targets)}", target)
        if (drafter, target) not in drafters:
            drafters[drafter, target] = make_drafter(root / f"drafter-{len(drafters)}", drafter, target)
        return served(Pair(targets[target], drafters[drafter, target], target, drafter))

    return pair


@pytest.fixture(scope="session")
def trained(pytestconfig: pytest.Config, served: Callable[[Pair], Pair]) -> Callable[[str], Pair]:
    """A tiny pair by its name in `pairs.TRAINED`, whose drafter is often right. Kept in pytest's cache."""
    return lambda name: served(trained_pair(pytestconfig.cache.mkdir("trained-pairs"), TRAINED[name]))


@pytest.fixture(scope="session")
def demo(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The demo pair by architecture ("dflash2" as trained, "dflash" its layers without selector)."""
    root = tmp_path_factory.mktemp("demo")
    return lambda architecture: demo_pair(pytestconfig.getoption("--demo-pair"), architecture, root)
