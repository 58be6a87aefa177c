# SPDX-License-Identifier: Apache-2.0
"""Applies the seams, and takes them back, in the process at hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_dflash.engine import http_requests, seams
from vllm_dflash.engine.seams import Seam

_stock: dict[Seam, Any] = {}
_stock_architectures: dict[str, Any] = {}
_checked = False


def install() -> None:
    """The "always" seams: two hooks that look at the configuration and do nothing unless it is a DFlash one of ours."""
    _apply("always")


def activate(stage: str, runner: str | None = None) -> None:
    """Make this process ready for a DFlash engine: stage "config" where it is configured, "worker" in workers too.

    runner: "v1" or "v2", the model runner that a worker builds; the other one's seams stay as they are.

    Raises seams.SeamError, before anything is applied, if any seam of any stage does not hold.
    """
    global _checked
    if not _checked:
        import vllm

        seams.require(Path(vllm.__file__).parent, vllm.__version__)
        _checked = True
    _apply("config")
    if stage == "worker":
        _register_architectures()
        _take_back(lambda seam: seam.runner not in (None, runner))
        _apply("worker", runner)


class Passport:
    """Travels inside a SpeculativeConfig of ours: the process that unpickles it is made ready for it.

    A new engine-core process checks its configuration before it loads any plug-in, so that is the first moment.
    """

    def __init__(self, own_attention: bool = False) -> None:
        """own_attention: the drafter attends by the backend of attention_names.py."""
        self.own_attention = own_attention

    def __reduce__(self) -> tuple[Callable[[bool], Passport], tuple[bool]]:
        return _arrive, (self.own_attention,)


def _arrive(own_attention: bool) -> Passport:
    activate("config")
    if own_attention:
        from vllm_dflash.engine import attention_names

        attention_names.register()
    return Passport(own_attention)


def deactivate() -> None:
    """Put stock's objects back, for an engine of another kind in the same process.

    Engines that already run are not touched: they hold objects of ours, whose classes derive from stock's.
    """
    from vllm import ModelRegistry

    http_requests.narrow()
    metrics = sys.modules.get("vllm_dflash.engine.metrics")
    if metrics is not None:
        metrics.drop()
    if (names := sys.modules.get("vllm_dflash.engine.attention_names")) is not None:
        names.unregister()
    _take_back(lambda seam: seam.stage != "always")
    ModelRegistry.models.update(_stock_architectures)
    _stock_architectures.clear()


def _take_back(chosen: Callable[[Seam], bool]) -> None:
    for seam in [seam for seam in _stock if chosen(seam)]:
        owner, name = seams.owner_of(seam)
        setattr(owner, name, _stock.pop(seam))


def _apply(stage: str, runner: str | None = None) -> None:
    for seam in seams.SEAMS:
        if seam.stage != stage or seam.ours is None or seam in _stock or seam.runner not in (None, runner):
            continue
        owner, name = seams.owner_of(seam)
        stock = getattr(owner, name, None)
        if stock is None:
            import vllm

            seams.require(Path(vllm.__file__).parent, vllm.__version__)
        _stock[seam] = stock
        setattr(owner, name, _ours(seam.ours, stock))


def _ours(path: str, stock: Any) -> Any:
    module, name = path.split(":")
    ours = getattr(importlib.import_module(f"vllm_dflash.engine.{module}"), name)
    return ours if isinstance(ours, type) else ours(stock)


def _register_architectures() -> None:
    from vllm import ModelRegistry

    for name in seams.ARCHITECTURES:
        if name not in _stock_architectures and name in ModelRegistry.models:
            _stock_architectures[name] = ModelRegistry.models.pop(name)
            ModelRegistry.register_model(name, seams.DRAFTER)
