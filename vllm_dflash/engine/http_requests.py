# SPDX-License-Identifier: Apache-2.0
"""`vllm_xargs` over HTTP: stock's field takes strings, numbers and lists of them only.

While a DFlash engine is configured in this process, the field of the request classes takes an object too. The server
builds its routes after its engine, so that they see the wider field. And a bad option is refused where the request's
sampling parameters are made: the engine's front end, which sees them next, would tell it in a stream that has begun
with HTTP 200, and of a beam search it sees nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

FIELD = "vllm_xargs"
REQUESTS = (
    ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
    ("vllm.entrypoints.anthropic.protocol", "AnthropicMessagesRequest"),
)
# Anthropic's become chat requests.
CONVERSIONS = {
    "CompletionRequest": ("to_sampling_params", "to_beam_search_params"),
    "ChatCompletionRequest": ("to_sampling_params", "to_beam_search_params"),
    "ResponsesRequest": ("to_sampling_params",),
}
Scalar = str | int | float
WIDER = dict[str, Scalar | list[Scalar] | dict[str, Any]] | None

_stock: dict[type, Any] = {}
_stock_conversions: list[tuple[type, str, Any]] = []


def widen() -> None:
    """Let `vllm_xargs` hold objects, and refuse bad options in it. What stock's field takes is read as before."""
    for module, name in REQUESTS:
        request = getattr(importlib.import_module(module), name)
        if request not in _stock:
            _stock[request] = request.model_fields[FIELD].annotation
            _set(request, WIDER)
            for conversion in CONVERSIONS.get(name, ()):
                stock = getattr(request, conversion)
                _stock_conversions.append((request, conversion, stock))
                setattr(request, conversion, _checked(stock))


def narrow() -> None:
    """Stock's classes again."""
    while _stock_conversions:
        setattr(*_stock_conversions.pop())
    while _stock:
        _set(*_stock.popitem())


def _checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_dflash.engine.requests import check

        check(getattr(self, FIELD))
        return stock(self, *args, **kwargs)

    return wrapper


def _set(request: Any, annotation: Any) -> None:
    request.model_fields[FIELD].annotation = annotation
    request.model_rebuild(force=True)
