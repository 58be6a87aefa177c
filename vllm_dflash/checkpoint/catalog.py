# SPDX-License-Identifier: Apache-2.0
"""Which published draft belongs to which target, by exact model id."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_dflash.checkpoint.bounded_json import parse_json_object, read_json_object
from vllm_dflash.checkpoint.errors import CheckpointError

Name = Annotated[str, Field(min_length=1, max_length=4096)]


class CatalogEntry(BaseModel):
    """One pair: `target` and `draft` are hub ids or paths, `revision` is the draft's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    target: Name
    draft: Name
    revision: Name | None = None
    note: str = ""


def find_draft(target: str, user_catalog: Path | None = None) -> CatalogEntry | None:
    """The catalogue's draft for `target`, or None; `user_catalog` adds to the published pairs, and wins.

    Only the exact id counts, or, for a target in a folder, the same folder. Raises CheckpointError for a user
    catalogue that cannot be read.
    """
    catalogs = [published_pairs()]
    if user_catalog is not None:
        catalogs.insert(0, read_catalog(user_catalog))
    folder = _folder(target)
    for entries in catalogs:
        for entry in entries:
            if entry.target == target or (folder is not None and folder == _folder(entry.target)):
                return entry
    return None


def published_pairs() -> tuple[CatalogEntry, ...]:
    """The pairs that come with this package: DFlash 2 where there is one for the target, else DFlash."""
    data = files("vllm_dflash.checkpoint").joinpath("catalog.json").read_bytes()
    return _entries(parse_json_object(data, "catalog.json"), "catalog.json")


def read_catalog(path: Path) -> tuple[CatalogEntry, ...]:
    """The pairs in a user's file: {"pairs": [{"target": …, "draft": …, "revision": …, "note": …}, …]}.

    Names that begin with ./ or ../ are paths from the file's folder. Raises CheckpointError.
    """
    raw = read_json_object(path, f"The draft catalogue {path}")
    return tuple(
        entry.model_copy(update={key: _beside(path, getattr(entry, key)) for key in ("target", "draft")})
        for entry in _entries(raw, f"The draft catalogue {path}")
    )


def _entries(raw: dict[str, Any], what: str) -> tuple[CatalogEntry, ...]:
    pairs = raw.get("pairs")
    if set(raw) != {"pairs"} or not isinstance(pairs, list):
        raise CheckpointError(
            "bad_catalog",
            f"{what} must be an object with the one key 'pairs', a list.",
            fix='For example {"pairs": [{"target": "Qwen/Qwen3-8B", "draft": "z-lab/Qwen3-8B-DFlash-b16"}]}.',
        )
    entries: dict[str, CatalogEntry] = {}
    for number, pair in enumerate(pairs, start=1):
        try:
            entry = CatalogEntry.model_validate(pair)
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(map(str, detail["loc"])) or "the entry"
            raise CheckpointError("bad_catalog", f"{what}, pair {number}: {where}: {detail['msg'].lower()}.") from None
        if entry.target in entries:
            raise CheckpointError(
                "bad_catalog",
                f"{what} names the target {entry.target} twice, with {entries[entry.target].draft} and {entry.draft}.",
                fix="Keep one.",
            )
        entries[entry.target] = entry
    return tuple(entries.values())


def _beside(path: Path, name: str) -> str:
    return str((path.parent / name).resolve()) if name.startswith(("./", "../")) else name


def _folder(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.resolve() if path.is_dir() else None
    except (OSError, ValueError, RuntimeError):
        return None
