# SPDX-License-Identifier: Apache-2.0
"""What each request asked for: read by the front end, which refuses a bad value, and by the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_dflash.engine.hooks import is_ours
from vllm_dflash.options import NO_REQUEST_OPTIONS, RequestOptionError, RequestOptions, request_options, shown


class BadRequest(VLLMValidationError, ValueError):
    """HTTP 400 that names the field, and a ValueError from `LLM.generate`."""

    def __init__(self, error: RequestOptionError) -> None:
        VLLMValidationError.__init__(self, str(error), parameter=f"vllm_xargs.{error.field}", value=shown(error.value))


def check(extra_args: Mapping[str, Any] | None) -> None:
    """Raise BadRequest unless a request's options are good."""
    try:
        request_options(extra_args)
    except RequestOptionError as error:
        raise BadRequest(error) from None


def validate_spec_decode(stock: Callable[..., None]) -> Callable[..., None]:
    """SamplingParams._validate_spec_decode: the front end calls it before a request reaches the engine."""

    @functools.wraps(stock)
    def wrapper(self: Any, speculative_config: Any) -> None:
        if not is_ours(speculative_config):
            stock(self, speculative_config)
            return
        check(self.extra_args)
        # Stock refuses min_p and logit_bias. Another rejection method is stock's own and does not apply them.
        if speculative_config.rejection_sample_method != "standard":
            stock(self, speculative_config)

    return wrapper


class RequestTable:
    """The options of the requests that are alive, read once each."""

    def __init__(self) -> None:
        # With the arguments they were read from: a later request may have the id of one that has ended.
        self._known: dict[str, tuple[Mapping[str, Any], RequestOptions]] = {}

    def options(self, request_id: str, sampling_params: Any) -> RequestOptions:
        """sampling_params: the request's, None for a request that does not sample."""
        extra_args: Mapping[str, Any] | None = getattr(sampling_params, "extra_args", None)
        if not extra_args:
            return NO_REQUEST_OPTIONS
        known = self._known.get(request_id)
        if known is None or known[0] is not extra_args:
            try:
                options = request_options(extra_args)
            except RequestOptionError:
                # It came past the front end's check; a request never ends the engine.
                options = NO_REQUEST_OPTIONS
            known = self._known[request_id] = extra_args, options
        return known[1]

    def forget(self, alive: Container[str]) -> None:
        """Drop what belongs to requests that have ended."""
        for request_id in [request_id for request_id in self._known if request_id not in alive]:
            del self._known[request_id]
