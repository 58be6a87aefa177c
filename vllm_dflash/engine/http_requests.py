# SPDX-License-Identifier: Apache-2.0
"""Objects in `vllm_xargs` over HTTP: stock's field takes strings, numbers and lists of them only.

While a DFlash engine is configured in this process, the field of the request classes takes an object too. The server
builds its routes after its engine, so that they see the wider field.
"""

from __future__ import annotations

import importlib
from typing import Any

FIELD = "vllm_xargs"
REQUESTS = (
    ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
    ("vllm.entrypoints.anthropic.protocol", "AnthropicMessagesRequest"),
)
Scalar = str | int | float
WIDER = dict[str, Scalar | list[Scalar] | dict[str, Any]] | None

_stock: dict[type, Any] = {}


def widen() -> None:
    """Let `vllm_xargs` hold objects. What stock's field takes is read as before."""
    for module, name in REQUESTS:
        request = getattr(importlib.import_module(module), name)
        if request not in _stock:
            _stock[request] = request.model_fields[FIELD].annotation
            _set(request, WIDER)


def narrow() -> None:
    """Stock's field again."""
    while _stock:
        _set(*_stock.popitem())


def _set(request: Any, annotation: Any) -> None:
    request.model_fields[FIELD].annotation = annotation
    request.model_rebuild(force=True)
