# SPDX-License-Identifier: Apache-2.0
"""The published pairs and a user's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.published import PUBLISHED, Published
from vllm_dflash.checkpoint import CatalogEntry, CheckpointError, find_draft, published_pairs


def write(tmp_path: Path, raw: Any) -> Path:
    path = tmp_path / "drafts.json"
    path.write_text(json.dumps(raw))
    return path


def pairs(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"pairs": list(entries)}


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.draft)
def test_published_drafts_are_found_by_the_exact_id(published: Published) -> None:
    entry = find_draft(published.target)
    assert entry is not None and entry.draft == published.draft


def test_published_catalogue_is_sound() -> None:
    entries = published_pairs()
    assert len(entries) == 18
    for entry in entries:
        assert entry.target.count("/") == entry.draft.count("/") == 1
        assert "DFlash" in entry.draft and entry.revision is None


@pytest.mark.parametrize("target", ["qwen/qwen3-8b", "Qwen/Qwen3-8B-FP8", "Qwen3-8B", "/models/Qwen/Qwen3-8B", ""])
def test_nothing_but_the_exact_id(target: str) -> None:
    assert find_draft(target) is None


def test_a_users_catalogue_adds_and_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        pairs(
            {"target": "Qwen/Qwen3-8B", "draft": "me/better", "revision": "abc", "note": "mine"},
            {"target": "me/target", "draft": "me/draft"},
        ),
    )
    assert find_draft("Qwen/Qwen3-8B", path) == CatalogEntry(
        target="Qwen/Qwen3-8B", draft="me/better", revision="abc", note="mine"
    )
    assert find_draft("me/target", path) == CatalogEntry(target="me/target", draft="me/draft")
    assert find_draft("Qwen/Qwen3-4B", path) == find_draft("Qwen/Qwen3-4B")
    assert find_draft("nobody/nothing", path) is None


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    path = write(
        tmp_path,
        pairs({"target": "./target", "draft": "./draft"}, {"target": "/other/target", "draft": "me/draft"}),
    )
    expected = CatalogEntry(target=str(tmp_path / "target"), draft=str(tmp_path / "draft"))
    assert find_draft(str(tmp_path / "target"), path) == expected
    assert find_draft(str(tmp_path / "target") + "/", path) == expected
    monkeypatch.chdir(tmp_path)
    assert find_draft("target", path) == expected
    assert find_draft("/other/target", path) == CatalogEntry(target="/other/target", draft="me/draft")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            [],
            "The draft catalogue {path} holds a list, not a JSON object.",
        ),
        (
            {"Qwen/Qwen3-8B": "me/draft"},
            "The draft catalogue {path} must be an object with the one key 'pairs', a list. For example "
            '{{"pairs": [{{"target": "Qwen/Qwen3-8B", "draft": "z-lab/Qwen3-8B-DFlash-b16"}}]}}.',
        ),
        (pairs({"target": "a/b"}), "The draft catalogue {path}, pair 1: draft: field required."),
        (
            pairs({"target": "a/b", "draft": 3}),
            "The draft catalogue {path}, pair 1: draft: input should be a valid string.",
        ),
        (
            pairs({"target": "a/b", "draft": "c/d", "method": "x"}),
            "The draft catalogue {path}, pair 1: method: extra inputs are not permitted.",
        ),
        (
            pairs({"target": "a/b", "draft": "c/d"}, {"target": "a/b", "draft": "e/f"}),
            "The draft catalogue {path} names the target a/b twice, with c/d and e/f. Keep one.",
        ),
    ],
)
def test_faults_of_a_users_catalogue(tmp_path: Path, raw: Any, message: str) -> None:
    path = write(tmp_path, raw)
    with pytest.raises(CheckpointError) as caught:
        find_draft("a/b", path)
    assert str(caught.value) == message.format(path=path)


def test_absent_and_damaged_catalogues(tmp_path: Path) -> None:
    path = tmp_path / "drafts.json"
    with pytest.raises(CheckpointError) as caught:
        find_draft("a/b", path)
    assert str(caught.value) == f"The draft catalogue {path} does not exist."
    path.write_text('{"pairs": [}')
    with pytest.raises(CheckpointError) as caught:
        find_draft("a/b", path)
    assert str(caught.value) == (
        f"The draft catalogue {path} is not valid JSON: Expecting value: line 1 column 12 (char 11)."
    )
    path.write_text(" " * (5 << 20))
    with pytest.raises(CheckpointError) as caught:
        find_draft("a/b", path)
    assert str(caught.value) == f"The draft catalogue {path} is larger than 4194304 bytes."
