# SPDX-License-Identifier: Apache-2.0
"""Who serves a drafter under test, and where stock vLLM can serve it too."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.checkpoints import DrafterShape
from tests.support.engine import ASYNCHRONOUS, EngineProcess, Runner


@dataclass(frozen=True)
class Serving:
    """The plug-in, or (pytest --serving stock) stock vLLM, which judges the suites themselves."""

    plugin: bool
    runner: Runner
    processes: Callable[..., EngineProcess]
    asynchronous: bool = False

    def process(self, shape: DrafterShape, **options) -> EngineProcess:
        """A process whose engine can serve a drafter of this shape.

        Stock serves DFlash 2, and drafters that mix windows with full attention, on V2 only.
        """
        runner = self.runner
        if not self.plugin and (shape.architecture == "dflash2" or len(set(shape.layer_types or ())) > 1):
            runner = "v2"
        if self.asynchronous and runner == "v2":
            options["environment"] = (*options.get("environment", ()), ASYNCHRONOUS)
        return self.processes(runner=runner, plugin=self.plugin, **options)

    @property
    def late(self) -> int:
        """Steps with planned rows after the one that tells that a request can have no drafts."""
        return {"v1": 0, "v2": 2 if self.asynchronous else 1}[self.runner]

    def needs_plugin(self, what: str) -> None:
        if not self.plugin:
            pytest.skip(f"{what}: only the plug-in has it")
