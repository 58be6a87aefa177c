# SPDX-License-Identifier: Apache-2.0
"""mask_embedding.pt: both forms, and nothing in it runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_dflash.checkpoint import CheckpointError
from vllm_dflash.checkpoint.mask_embedding import read_mask_embedding

ROW = torch.linspace(-1, 1, 64)


def read(tmp_path: Path, state: Any) -> torch.Tensor:
    torch.save(state, tmp_path / "mask_embedding.pt")
    return read_mask_embedding(tmp_path / "mask_embedding.pt", hidden_size=64, mask_token_id=255)


@pytest.mark.parametrize(
    "state",
    [
        ROW,
        ROW[None],
        ROW[:, None],
        torch.nn.Parameter(ROW.clone()),
        {"embedding": ROW},
        {"embedding": ROW, "mask_token_id": 255},
        {"embedding": ROW, "mask_token_id": torch.tensor(255)},
    ],
)
def test_both_forms(tmp_path: Path, state: Any) -> None:
    row = read(tmp_path, state)
    assert torch.equal(row, ROW) and not row.requires_grad


def test_dtype_is_kept(tmp_path: Path) -> None:
    assert read(tmp_path, ROW.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"embedding": ROW, "mask_token_id": 254},
            "mask_embedding.pt is for mask_token_id 254, but config.json says 255. Take both from the same "
            "revision of the checkpoint.",
        ),
        (
            {"embedding": ROW, "mask_token_id": "255"},
            "mask_embedding.pt is for mask_token_id '255', but config.json says 255. Take both from the same "
            "revision of the checkpoint.",
        ),
        (ROW[:32].clone(), "mask_embedding.pt has the shape [32], but the draft's hidden size is 64."),
        (ROW.reshape(8, 8), "mask_embedding.pt has the shape [8, 8], but the draft's hidden size is 64."),
        (torch.zeros(()), "mask_embedding.pt has the shape [], but the draft's hidden size is 64."),
        (
            torch.arange(64),
            "mask_embedding.pt holds torch.int64 on cpu; plain floating-point numbers are due.",
        ),
        (
            torch.zeros(64, device="meta"),
            "mask_embedding.pt holds torch.float32 on meta; plain floating-point numbers are due.",
        ),
        (torch.full((64,), torch.nan), "mask_embedding.pt has numbers that are not finite."),
        ({}, "mask_embedding.pt holds a NoneType; a tensor is due, or a dict with the tensor 'embedding'."),
        ([ROW], "mask_embedding.pt holds a list; a tensor is due, or a dict with the tensor 'embedding'."),
    ],
)
def test_refusals(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, state)
    assert str(caught.value) == message


class Trap:
    """Unpickled without care, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^mask_embedding\.pt cannot be loaded with weights_only \("):
        read(tmp_path, {"embedding": ROW, "mask_token_id": Trap(tmp_path / "ran")})
    assert not (tmp_path / "ran").exists()


def test_no_pickle_at_all(tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"not a tensor")
    with pytest.raises(CheckpointError, match="cannot be loaded with weights_only"):
        read_mask_embedding(tmp_path / "mask_embedding.pt", hidden_size=64, mask_token_id=255)


def test_a_view_of_the_whole_table_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "mask_embedding.pt"
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(CheckpointError) as caught:
        read_mask_embedding(path, hidden_size=64, mask_token_id=255)
    assert str(caught.value) == (
        "mask_embedding.pt is 68157440 bytes; one row of 64 numbers is due. Save a clone of the row: a view "
        "carries its whole table."
    )
