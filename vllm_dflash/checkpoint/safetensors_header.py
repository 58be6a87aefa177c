# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files: names, shapes and offsets, read without torch and without the data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint.bounded_json import parse_json_object, read_json_object
from vllm_dflash.checkpoint.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
MASK_EMBEDDING_FILE = "mask_embedding.pt"
MAX_HEADER_BYTES = 32 << 20
MAX_FILES = 1024
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file: `begin` and `end` are byte offsets in the file, -1 where unknown."""

    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    begin: int = -1
    end: int = -1


def tensor_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor's data: what its header says, else its shape times its dtype's size (unknown ones: 2)."""
    if info.end >= 0:
        return info.end - info.begin
    return math.prod(info.shape) * _BITS.get(info.dtype, 16) // 8


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Name to TensorInfo for the tensors of the safetensors file `path`.

    Checks that the header is bounded JSON and that the tensors tile the rest of the file without gap or
    overlap. Raises CheckpointError.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(
                    "bad_weights",
                    f"{path.name} is no safetensors file, or is cut short: {size} bytes, of which its header "
                    f"claims {length if size >= 8 else 8}.",
                    fix="Download it again.",
                )
            data = file.read(length)
    except OSError as error:
        raise CheckpointError("unreadable_file", f"{path} cannot be read: {error}.") from None
    header = parse_json_object(data, f"The header of {path.name}", max_depth=8)
    start = 8 + length
    tensors = {
        name: _tensor_info(name, entry, path.name, start) for name, entry in header.items() if name != "__metadata__"
    }
    _check_tiling(tensors, path.name, start, size)
    return tensors


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """Name to TensorInfo for all tensors of a checkpoint folder, from its index or its *.safetensors files.

    Raises CheckpointError for a pickle where safetensors is due, no weights, a bad index, or a tensor that
    stands in two files.
    """
    tensors: dict[str, TensorInfo] = {}
    for name in safetensors_files(folder):
        for tensor, info in read_header(folder / name).items():
            if tensor in tensors:
                raise CheckpointError("bad_weights", f"{tensor} stands both in {tensors[tensor].file} and in {name}.")
            tensors[tensor] = info
    return tensors


def safetensors_files(folder: Path) -> list[str]:
    """Names of the weight files of `folder`, as its index lists them, else all *.safetensors.

    Raises CheckpointError.
    """
    index = folder / INDEX_FILE
    if index.exists():
        names = index_files(read_json_object(index, INDEX_FILE, MAX_HEADER_BYTES))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                "missing_file",
                f"{INDEX_FILE} names {absent[0]}, which is not there.",
                fix="Download it again.",
            )
        return names
    try:
        present = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except OSError as error:
        raise CheckpointError("unreadable_file", f"{folder} cannot be read: {error}.") from None
    names = [name for name in present if name.endswith(".safetensors")]
    if not names:
        pickles = [n for n in present if n.endswith(PICKLE_SUFFIXES) and n != MASK_EMBEDDING_FILE]
        raise no_safetensors(str(folder), pickles)
    return names


def index_files(index: dict[str, Any]) -> list[str]:
    """The distinct file names in a safetensors index. Raises CheckpointError for a name that has a path."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("bad_weights", f"{INDEX_FILE} has no weight_map.")
    names: dict[str, None] = {}
    for name in weight_map.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                "bad_weights",
                f"{INDEX_FILE} names the file {str(name)[:80]!r}; only a safetensors file beside it is read.",
            )
        names[name] = None
    if len(names) > MAX_FILES:
        raise CheckpointError("bad_weights", f"{INDEX_FILE} names {len(names)} files; at most {MAX_FILES} are read.")
    return list(names)


def no_safetensors(where: str, pickles: list[str]) -> CheckpointError:
    """The error for a checkpoint without safetensors weights, with or without pickles in their place."""
    if pickles:
        return CheckpointError(
            "pickle",
            f"{where} has {pickles[0]}, a pickle, where safetensors weights are due.",
            "A pickle can run code when it is loaded, so this package never loads one as weights.",
            "Convert it to model.safetensors, or use a checkpoint published as safetensors.",
        )
    return CheckpointError("no_weights", f"{where} has no safetensors weights.", fix="Check the path or download it.")


def _tensor_info(name: str, entry: Any, file: str, start: int) -> TensorInfo:
    """One header entry. Raises CheckpointError for anything that the format does not allow."""

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60

    if isinstance(entry, dict):
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if (
            isinstance(dtype, str)
            and isinstance(shape, list)
            and len(shape) <= 16
            and all(map(whole, shape))
            and isinstance(offsets, list)
            and len(offsets) == 2
            and all(map(whole, offsets))
        ):
            begin, end = offsets
            bits = _BITS.get(dtype)
            if begin <= end and (bits is None or (end - begin) * 8 == math.prod(shape) * bits):
                return TensorInfo(dtype, tuple(shape), file, start + begin, start + end)
    raise CheckpointError("bad_weights", f"The header of {file} describes {name[:80]!r} wrongly: {str(entry)[:120]}.")


def _check_tiling(tensors: dict[str, TensorInfo], file: str, start: int, size: int) -> None:
    """Raise CheckpointError unless the tensors cover bytes `start` to `size` once each."""
    at = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != at:
            raise CheckpointError(
                "bad_weights",
                f"{file} is damaged: {name[:80]!r} begins at byte {info.begin}, where {at} is due.",
                fix="Download it again.",
            )
        at = info.end
    if at != size:
        raise CheckpointError(
            "bad_weights",
            f"{file} is damaged or cut short: its tensors end at byte {at}, the file at {size}.",
            fix="Download it again.",
        )
