# SPDX-License-Identifier: Apache-2.0
"""The user's options: the server's, under "dflash" in --additional-config, and a request's, in its extra_args."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

KEY = "dflash"
# Characters of what was given that an error shows.
SHOWN = 200


class ServerOptions(BaseModel):
    """Options of the server, from `--additional-config '{"dflash": {...}}'`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    catalog: Path | None = None
    """A JSON file of target/draft pairs, read before the built-in catalogue."""

    block_length: Literal["auto"] | Annotated[int, Field(strict=True, ge=0)] = "auto"
    """Drafts a request and step: what pays most by measured cost and acceptance, or always this many."""

    draft_window: int | None = Field(default=None, ge=1)
    """Tokens that the draft's full-attention layers look back, so that a draft's cost stays flat with the context."""

    extend_draft_range: bool = False
    """Draft past the positions that the draft was trained on, by its rotary formula."""

    metrics: bool = True
    """Whether the `vllm_dflash:` metrics are measured and stand on /metrics."""

    workloads: int = Field(default=16, ge=0, le=1000)
    """The most names that requests may give their workload in the metrics; all further ones are "other"."""


class RequestOptions(BaseModel):
    """Options of one request, from `SamplingParams.extra_args` or, over HTTP, `vllm_xargs`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_draft_tokens: int | None = Field(default=None, ge=0)
    """At most so many drafts a step; 0 turns speculation off for the request, None leaves it to the server."""

    workload: str | None = Field(default=None, min_length=1, max_length=64)
    """A label for this kind of traffic, for the metrics."""


class RequestOptionError(ValueError):
    """A request's options are wrong. field: which, as the user wrote it. value: what was given."""

    def __init__(self, message: str, field: str, value: Any) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


NO_REQUEST_OPTIONS = RequestOptions()


def server_options(additional_config: Any) -> ServerOptions:
    """The options in vLLM's `additional_config`; the defaults where it has none.

    Raises ValueError, a sentence that names the field.
    """
    if not isinstance(additional_config, dict):
        return ServerOptions()
    given = additional_config.get(KEY, {})
    if not isinstance(given, dict):
        raise ValueError(
            f'"dflash" in --additional-config must be an object such as {{"catalog": "pairs.json"}}, it is {given!r}.'
        )
    try:
        return ServerOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f'"dflash" in --additional-config: {field}: {first["msg"]} (given: {first["input"]!r}). '
            f"Known options: {_names(ServerOptions)}."
        ) from None


def request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """The options in a request's `extra_args`; the defaults where it has none.

    Three spellings, which may be mixed: {"dflash": {"max_draft_tokens": 3}}, the same object as a JSON string, and
    flat keys {"dflash.max_draft_tokens": 3}. Raises RequestOptionError, a sentence that names the field.
    """
    if not extra_args:
        return NO_REQUEST_OPTIONS
    # Where each option was written, for the message.
    spelled: dict[str, str] = {}
    given: dict[str, Any] = {}
    if KEY in extra_args:
        for name, value in _object(extra_args[KEY]).items():
            given[name], spelled[name] = value, f"{KEY}.{name}"
    for key, value in extra_args.items():
        if not key.startswith(f"{KEY}."):
            continue
        name = key.removeprefix(f"{KEY}.")
        if name in given and given[name] != value:
            twice = f"as {shown(given[name])} and as {shown(value)}"
            raise RequestOptionError(f"{_cut(key)} is given twice, {twice}.", _cut(key), value)
        given[name], spelled[name] = value, key
    if not given:
        return NO_REQUEST_OPTIONS
    try:
        return RequestOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        # A name that is no text (half of a surrogate pair) has no place.
        name = str(first["loc"][0]) if first["loc"] else next(iter(given))
        field = _cut(spelled.get(name, f"{KEY}.{name}"))
        given_there = shown(given.get(name))
        raise RequestOptionError(
            f"{field}: {first['msg']} (given: {given_there}). Options of a request: {_names(RequestOptions)}.",
            field,
            given.get(name),
        ) from None


def _object(value: Any) -> dict[str, Any]:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, dict):
        raise RequestOptionError(
            f'{KEY}: must be an object such as {{"max_draft_tokens": 3}}, or that as a JSON string '
            f"(given: {shown(value)}).",
            KEY,
            value,
        )
    return parsed


def shown(value: Any) -> str:
    """What was given, as an error shows it."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _names(options: type[BaseModel]) -> str:
    return ", ".join(sorted(options.model_fields))
