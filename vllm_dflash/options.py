# SPDX-License-Identifier: Apache-2.0
"""The user's options: what stands under "dflash" in --additional-config."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class ServerOptions(BaseModel):
    """Options of the server, from `--additional-config '{"dflash": {...}}'`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    catalog: Path | None = None
    """A JSON file of target/draft pairs, read before the built-in catalogue."""


def server_options(additional_config: Any) -> ServerOptions:
    """The options in vLLM's `additional_config`; the defaults where it has none.

    Raises ValueError, a sentence that names the field.
    """
    if not isinstance(additional_config, dict):
        return ServerOptions()
    given = additional_config.get("dflash", {})
    if not isinstance(given, dict):
        raise ValueError(
            f'"dflash" in --additional-config must be an object such as {{"catalog": "pairs.json"}}, it is {given!r}.'
        )
    try:
        return ServerOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        known = ", ".join(sorted(ServerOptions.model_fields))
        raise ValueError(
            f'"dflash" in --additional-config: {field}: {first["msg"]} (given: {first["input"]!r}). '
            f"Known options: {known}."
        ) from None
