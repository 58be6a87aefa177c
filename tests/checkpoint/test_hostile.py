# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that somebody made to do harm: always an error in a sentence, soon, in little memory, and nothing
of theirs runs. `make fuzz` tries many more (DFLASH_FUZZ_EXAMPLES)."""

import io
import json
import os
import pickle
import random
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.checkpoint.samples import speculators, write_checkpoint, zlab, zlab2
from vllm_dflash.checkpoint import CheckpointError, load_draft, parse_config, required_tensors
from vllm_dflash.checkpoint.mask_embedding import read_mask_embedding

EXAMPLES = int(os.environ.get("DFLASH_FUZZ_EXAMPLES", "60"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="DFLASH_FUZZ_EXAMPLES" not in os.environ,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FILES = ("config.json", "model.safetensors", "mask_embedding.pt")
SECONDS, MEGABYTES = 10.0, 400


@pytest.fixture(autouse=True)
def bounded() -> Any:
    """No test of this file may take much more memory than it found."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10


def outcome(call: Callable[[], Any]) -> str | None:
    """None where it was read, else the error's sentence; anything but a CheckpointError fails the test."""
    start = time.process_time()
    try:
        call()
        return None
    except CheckpointError as error:
        message = str(error)
        assert len(message) < 2000 and message.rstrip().endswith((".", ")")), message
        return message
    finally:
        assert time.process_time() - start < SECONDS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = []
    for number, raw in enumerate((zlab(), zlab2(), speculators("dflash2"))):
        folder = tmp_path_factory.mktemp(f"whole-{number}")
        write_checkpoint(folder, raw, required_tensors(parse_config(raw)))
        torch.save({"embedding": torch.ones(64), "mask_token_id": 255}, folder / "mask_embedding.pt")
        assert load_draft(str(folder)).mask_embedding is not None
        folders.append(folder)
    return folders


INSERTIONS = [b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"1e999", b"NaN", b"-", b"\xed\xa0\x80"]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or overwritten with the numbers that break parsers."""
    content = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(content) + 1) if rng.random() < 0.5 else rng.randrange(min(len(content), 400) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[at : at + rng.choice([1, 8, 64, len(content)])]
        elif kind == 2:
            content[at:at] = content[at : at + rng.choice([1, 8, 64])]
        elif kind == 3:
            edge = rng.choice([b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, (1 << 40).to_bytes(8, "little")])
            content[at : at + 8] = edge
        else:
            content[at:at] = rng.choice(INSERTIONS)
    return bytes(content)


@FUZZ
@given(st.integers(0, 1 << 60))
def test_damaged_folders(whole: list[Path], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    source = rng.choice(whole)
    for name in FILES:
        data = (source / name).read_bytes()
        (tmp_path / name).write_bytes(damage(data, rng) if rng.random() < 0.5 else data)
    outcome(lambda: load_draft(str(tmp_path)))


# Opcodes of pickle that build, call and import; the machine must refuse or ignore any order of them.
PIECES = [
    b"cos\nsystem\n", b"cbuiltins\nexec\n", b"c__builtin__\neval\n", b"\x8c\x02os\x8c\x06system\x93",
    b"ctorch\nload\n", b"ctorch.hub\nload\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n",
    b"(", b")", b"t", b"R", b"o", b"b", b"]", b"}", b"a", b"e", b"s", b"u", b"0", b"2", b"q\x00", b"h\x00",
    b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"K\x01", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"B\xff\xff\xff\x7f",
    b"\x96" + b"\xff" * 7 + b"\x7f", b"Q", b"\x8c\x07storage", b"X\x04\x00\x00\x00rm -", b"\x85", b"\x86", b"\x87",
    b"N", b"\x88", b"G" + b"\x7f\xf0" + b"\0" * 6, b".",
]  # fmt: skip


@FUZZ
@given(st.lists(st.sampled_from(PIECES), max_size=24), st.sampled_from([2, 4]), st.booleans())
def test_pickles(tmp_path: Path, pieces: list[bytes], protocol: int, zipped: bool) -> None:
    path = tmp_path / "mask_embedding.pt"
    program = b"\x80" + bytes([protocol]) + b"".join(pieces) + b"."
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", program)
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/data/0", bytes(256))
    else:
        path.write_bytes(program)
    said = outcome(lambda: read_mask_embedding(path, hidden_size=64, mask_token_id=255))
    assert said is not None and "mask_embedding.pt" in said


class Call:
    """Unpickled without care, it calls."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def nested(depth: int, width: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value] * width
    return value


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_of_theirs_runs(tmp_path: Path, legacy: bool) -> None:
    mark, path = tmp_path / "ran", tmp_path / "mask_embedding.pt"
    for function, arguments in (
        (os.system, (f"touch {mark}",)),
        (exec, (f"open({str(mark)!r}, 'w')",)),
        (Path.touch, (mark,)),
        (torch.save, (torch.ones(1), str(mark))),
        (pickle.loads, (pickle.dumps(Call(Path.touch, mark)),)),
    ):
        torch.save({"embedding": Call(function, *arguments)}, path, _use_new_zipfile_serialization=not legacy)
        assert outcome(lambda: read_mask_embedding(path, hidden_size=64, mask_token_id=255))
        assert not mark.exists()


@pytest.mark.parametrize(
    "state",
    [
        {"embedding": torch.ones(64), "mask_token_id": torch.ones(3)},
        {"embedding": torch.ones(64), "mask_token_id": nested(60, 2)},
        {"embedding": torch.ones(64), "mask_token_id": torch.ones(1, device="meta")},
        {"embedding": torch.ones(64), "mask_token_id": float("nan")},
        {"embedding": torch.ones(64), "mask_token_id": "x" * 100_000},
        {"embedding": torch.ones(1).expand(1 << 40)},
        {"embedding": torch.empty(1 << 40, device="meta")},
        {"embedding": torch.ones(64).to_sparse()},
        {"embedding": torch.ones(64, dtype=torch.complex64)},
        {"embedding": torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8)},
        {"embedding": nested(60, 2)},
        torch.full((64,), torch.inf),
        nested(60, 2),
    ],
)
def test_states_that_are_no_row(tmp_path: Path, state: Any) -> None:
    path = tmp_path / "mask_embedding.pt"
    torch.save(state, path)
    assert outcome(lambda: read_mask_embedding(path, hidden_size=64, mask_token_id=255))


def test_a_small_archive_that_unpacks_to_gigabytes(tmp_path: Path) -> None:
    plain = io.BytesIO()
    torch.save(torch.ones(64), plain)
    path = tmp_path / "mask_embedding.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in source.infolist():
            data = source.read(entry)
            with archive.open(entry.filename, "w", force_zip64=True) as out:
                for _ in range(3000 if entry.filename.endswith("data/0") else 0):
                    out.write(bytes(1 << 20))
                out.write(data)
    assert path.stat().st_size < 4 << 20
    said = outcome(lambda: read_mask_embedding(path, hidden_size=64, mask_token_id=255))
    assert said is not None and "one row of 64 numbers is due" in said


def test_what_is_no_file(whole: list[Path], tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for without end."""
    for name in FILES:
        folder = tmp_path / name
        folder.mkdir()
        for other in FILES:
            (folder / other).write_bytes((whole[0] / other).read_bytes())
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert outcome(lambda folder=folder: load_draft(str(folder)))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "C:\\x.safetensors", "\0"]
)
def test_paths_in_an_index(whole: list[Path], tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_bytes((whole[0] / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    said = outcome(lambda: load_draft(str(tmp_path)))
    assert said is not None and "only a safetensors file beside it is read" in said


def test_a_hole_in_a_file_is_not_read_into_memory(tmp_path: Path) -> None:
    """A reduced vocabulary's table of 8 GB that takes no disk."""
    raw = speculators(draft_vocab_size=128)
    shapes = required_tensors(parse_config(raw)) | {"d2t": (1 << 30,)}
    write_checkpoint(tmp_path, raw, shapes, {"d2t": "I64"})
    outcome(lambda: load_draft(str(tmp_path)))
