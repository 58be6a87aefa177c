# SPDX-License-Identifier: Apache-2.0
"""The header reader: against the safetensors library, and against damaged and hostile files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.samples import data, write_safetensors
from vllm_dflash.checkpoint import CheckpointError, TensorInfo, read_folder, read_header
from vllm_dflash.checkpoint.safetensors_header import INDEX_FILE

WRONG = "The header of m.safetensors describes 'a' wrongly: "


def raw_file(path: Path, header: Any, data_bytes: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_folder(path) if path.is_dir() else read_header(path)
    return str(caught.value)


def test_against_the_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b.weight": torch.arange(4),
        "c": torch.zeros(()),
        "d": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "e": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_header(tmp_path / "model.safetensors")
    assert {name: info.shape for name, info in read.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {name: info.dtype for name, info in read.items()} == {
        "a": "BF16", "b.weight": "I64", "c": "F32", "d": "F8_E4M3", "e": "F32"
    }  # fmt: skip
    info = read["b.weight"]
    stored = (tmp_path / info.file).read_bytes()[info.begin : info.end]
    assert stored == torch.arange(4).numpy().tobytes()


def test_muse_glimmer_sized_file(tmp_path: Path) -> None:
    shapes = {name: tuple(shape) for name, shape in data("dflash2-muse-glimmer-30b.shapes.json")["shapes"].items()}
    path = write_safetensors(tmp_path / "model.safetensors", shapes)
    assert {name: info.shape for name, info in read_header(path).items()} == shapes


def test_shards_by_their_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": (2,), "b": (3,)})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": (4,)})
    write_safetensors(tmp_path / "other.safetensors", {"z": (9,)})
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}
    index["weight_map"]["c"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    read = read_folder(tmp_path)
    assert {name: (info.shape, info.file) for name, info in read.items()} == {
        "a": ((2,), "model-00001-of-00002.safetensors"),
        "b": ((3,), "model-00001-of-00002.safetensors"),
        "c": ((4,), "model-00002-of-00002.safetensors"),
    }
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert refusal(tmp_path) == (
        f"{INDEX_FILE} names model-00002-of-00002.safetensors, which is not there. Download it again."
    )


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": (2,)})
    write_safetensors(tmp_path / "y.safetensors", {"b": (2,)})
    assert set(read_folder(tmp_path)) == {"a", "b"}
    write_safetensors(tmp_path / "z.safetensors", {"b": (2,)})
    assert refusal(tmp_path) == "b stands both in y.safetensors and in z.safetensors."


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\x.safetensors",
        "x.bin",
        ".safetensors",
        7,
        None,
    ],
)
def test_index_names_a_file_elsewhere(tmp_path: Path, name: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    assert refusal(tmp_path) == (
        f"{INDEX_FILE} names the file {str(name)!r}; only a safetensors file beside it is read."
    )


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_index_without_a_map(tmp_path: Path, index: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert refusal(tmp_path) == f"{INDEX_FILE} has no weight_map."


def test_pickles_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} has no safetensors weights. Check the path or download it."
    torch.save(torch.zeros(4), tmp_path / "mask_embedding.pt")
    assert refusal(tmp_path) == f"{tmp_path} has no safetensors weights. Check the path or download it."
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path) == (
        f"{tmp_path} has pytorch_model.bin, a pickle, where safetensors weights are due. A pickle can run "
        "code when it is loaded, so this package never loads one as weights. Convert it to "
        "model.safetensors, or use a checkpoint published as safetensors."
    )
    write_safetensors(tmp_path / "model.safetensors", {"a": (2,)})
    size = (tmp_path / "model.safetensors").stat().st_size
    assert read_folder(tmp_path) == {"a": TensorInfo("BF16", (2,), "model.safetensors", size - 4, size)}


def test_pickle_under_the_name_of_safetensors(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    message = refusal(tmp_path)
    assert message.startswith(f"model.safetensors is no safetensors file, or is cut short: {size} bytes, of which")


def test_cut_short(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"a": (64,)})
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:-1])
    assert refusal(path) == (
        f"model.safetensors is damaged or cut short: its tensors end at byte {len(whole)}, the file at "
        f"{len(whole) - 1}. Download it again."
    )
    path.write_bytes(whole[: header // 2])
    assert refusal(path) == (
        f"model.safetensors is no safetensors file, or is cut short: {header // 2} bytes, of which its "
        f"header claims {header}. Download it again."
    )
    path.write_bytes(b"")
    assert refusal(path) == (
        "model.safetensors is no safetensors file, or is cut short: 0 bytes, of which its header claims 8. "
        "Download it again."
    )


def test_header_that_claims_the_machines_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    assert "claims 4611686018427387904. Download it again." in refusal(path)


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        (b"[]", 0, "The header of m.safetensors holds a list, not a JSON object."),
        (b"{", 0, "The header of m.safetensors is not valid JSON: Expecting property name enclosed in double "
         "quotes: line 1 column 2 (char 1)."),
        (b"\xff{}", 0, "The header of m.safetensors is not UTF-8 text (invalid start byte)."),
        (b"[" * 9000 + b"]" * 9000, 0, "The header of m.safetensors nests deeper than 8 levels."),
        (
            {"a": entry(0, 8), "b": entry(4, 12)}, 12,
            "m.safetensors is damaged: 'b' begins at byte {b}, where {at} is due. Download it again.",
        ),
        (
            {"a": entry(0, 4), "b": entry(8, 12)}, 12,
            "m.safetensors is damaged: 'b' begins at byte {b}, where {at} is due. Download it again.",
        ),
        ({"a": entry(0, 8)}, 12, "m.safetensors is damaged or cut short: its tensors end at byte"),
        ({"a": entry(0, 800)}, 12, "m.safetensors is damaged or cut short: its tensors end at byte"),
        ({"a": entry(8, 0, [2])}, 8, WRONG),
        ({"a": entry(0, 8, [3])}, 8, WRONG),
        ({"a": entry(0, 8, [-2])}, 8, WRONG),
        ({"a": entry(0, 8, [True, 2])}, 8, WRONG),
        ({"a": entry(0, 8, [1 << 61])}, 8, WRONG),
        ({"a": entry(0, 8, [2] + [1] * 20)}, 8, WRONG),
        ({"a": entry(0, 8, dtype=32)}, 8, WRONG),
        ({"a": entry(0, 8) | {"data_offsets": [0]}}, 8, WRONG),
        ({"a": [1]}, 8, "The header of m.safetensors describes 'a' wrongly: [1]."),
    ],
)  # fmt: skip
def test_hostile_headers(tmp_path: Path, header: Any, size: int, message: str) -> None:
    path = raw_file(tmp_path / "m.safetensors", header, size)
    start = 8 + len(json.dumps(header)) if isinstance(header, dict) else 0
    if "{b}" in message:
        offsets = header["b"]["data_offsets"]
        message = message.format(b=start + offsets[0], at=start + header["a"]["data_offsets"][1])
    assert refusal(path).startswith(message)


def test_brackets_in_names_are_no_nesting(tmp_path: Path) -> None:
    name = "[" * 50 + '"\\'
    path = raw_file(tmp_path / "m.safetensors", {name: entry(0, 4)}, 4)
    assert list(read_header(path)) == [name]


def test_dtypes_of_tomorrow_are_left_to_the_loader(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", {"a": entry(0, 4, [8], "F3")}, 4)
    assert read_header(path)["a"].dtype == "F3"


def test_absent_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "m.safetensors").startswith(f"{tmp_path / 'm.safetensors'} cannot be read: ")
