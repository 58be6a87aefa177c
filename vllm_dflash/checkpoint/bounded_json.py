# SPDX-License-Identifier: Apache-2.0
"""JSON from a checkpoint, read within bounds: a file that someone else made must not exhaust this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint.errors import CheckpointError

MAX_CONFIG_BYTES = 4 << 20
MAX_DEPTH = 32
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_json_object(data: bytes, what: str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Parse UTF-8 `data` as one JSON object; `what` names it in errors.

    Raises CheckpointError if it is no JSON, no object, or nested deeper than `max_depth`.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError("bad_json", f"{what} is not UTF-8 text ({error.reason}).") from None
    if _depth(text) > max_depth:
        raise CheckpointError("bad_json", f"{what} nests deeper than {max_depth} levels.")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("bad_json", f"{what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError("bad_json", f"{what} holds a {type(value).__name__}, not a JSON object.")
    return value


def read_json_object(path: Path, what: str | None = None, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the JSON object in the file `path` of at most `max_bytes` bytes.

    Raises CheckpointError if the file is absent, unreadable, too large, or holds anything else.
    """
    what = what or str(path)
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError("unreadable_file", f"{what} is no file.")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise CheckpointError("missing_file", f"{what} does not exist.") from None
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError("unreadable_file", f"{what} cannot be read: {error}.") from None
    if len(data) > max_bytes:
        raise CheckpointError("bad_json", f"{what} is larger than {max_bytes} bytes.")
    return parse_json_object(data, what)


def _depth(text: str) -> int:
    """Greatest nesting of brackets outside strings, counted before any parser recurses."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
