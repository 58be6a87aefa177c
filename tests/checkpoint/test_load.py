# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints: from a folder, from a hub, and from the hub's cache without a network."""

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.hub_server import COMMIT, hub_server
from tests.checkpoint.samples import speculators, target, write_checkpoint, write_safetensors, zlab, zlab2
from tests.support.checkpoints import (
    DrafterShape,
    TargetShape,
    drafter_config,
    drafter_weights,
    write_drafter,
)
from vllm_dflash.checkpoint import (
    CheckpointError,
    TargetFacts,
    check_pair,
    load_draft,
    parse_config,
    read_draft_config,
    required_tensors,
)


def shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return required_tensors(parse_config(raw))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("make", [zlab, zlab2, speculators])
def test_folder(tmp_path: Path, make: Any) -> None:
    folder = write_checkpoint(tmp_path / "draft", make(), shapes(make()))
    draft = load_draft(str(folder))
    assert draft.source == str(folder) and draft.folder == folder and draft.revision is None
    assert draft.config == parse_config(make()) and draft.raw == make()
    assert {name: info.shape for name, info in draft.tensors.items()} == shapes(make())
    assert draft.mask_embedding is None
    assert check_pair(target(), draft.config, draft.tensors) == []
    assert read_draft_config(str(folder)) == make()


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
@pytest.mark.parametrize("dialect", ["z-lab", "speculators"])
def test_checkpoints_that_other_tests_draft_with(tmp_path: Path, architecture: Any, dialect: Any) -> None:
    model = TargetShape()
    shape = DrafterShape(architecture=architecture, dialect=dialect, mask_embedding="dict", causal=False)
    folder = write_drafter(tmp_path, drafter_config(shape, model), drafter_weights(shape, model), shape)
    draft = load_draft(str(folder))
    facts = TargetFacts(
        name="t", vocab_size=model.vocab_size, hidden_size=model.hidden_size, num_layers=model.num_layers
    )
    assert check_pair(facts, draft.config, draft.tensors, shape.num_speculative_tokens) == []
    assert draft.config.is_dflash2 == (architecture == "dflash2") and draft.config.dialect == dialect
    assert draft.mask_embedding is not None and draft.mask_embedding.shape == (shape.hidden_size,)


def test_mask_embedding(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, zlab(), shapes(zlab()))
    torch.save({"embedding": torch.ones(64), "mask_token_id": 255}, folder / "mask_embedding.pt")
    row = load_draft(str(folder)).mask_embedding
    assert row is not None and torch.equal(row, torch.ones(64))
    torch.save({"embedding": torch.ones(64), "mask_token_id": 3}, folder / "mask_embedding.pt")
    assert refusal(lambda: load_draft(str(folder))) == (
        "mask_embedding.pt is for mask_token_id 3, but config.json says 255. Take both from the same "
        "revision of the checkpoint."
    )


def test_old_checkpoint_takes_the_targets_number_of_layers(tmp_path: Path) -> None:
    raw = zlab(dflash_config={"mask_token_id": 255}, num_target_layers=None)
    folder = write_checkpoint(tmp_path, raw, shapes(zlab()))
    assert refusal(lambda: load_draft(str(folder))).startswith("config.json names no target_layer_ids")
    assert load_draft(str(folder), num_target_layers=8).config.target_layer_ids == (1, 5)


def test_quantisation_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, zlab(), shapes(zlab()))
    assert load_draft(str(folder)).config.quant_method is None
    (folder / "hf_quant_config.json").write_text("{}")
    assert load_draft(str(folder)).config.quant_method == "modelopt"


def test_d2t_is_looked_into(tmp_path: Path) -> None:
    raw = zlab(draft_vocab_size=4)
    tensors = {name: torch.zeros(shape) for name, shape in shapes(raw).items()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors["d2t"] = torch.tensor([0, 9, 100, 252])
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_draft(str(tmp_path)).config.reduced_vocabulary
    tensors["d2t"] = torch.tensor([0, 9, 100, 253])
    save_file(tensors, tmp_path / "model.safetensors")
    assert refusal(lambda: load_draft(str(tmp_path))) == (
        "d2t maps the draft's id 3 to 256, but the vocabulary has 256 tokens. Download the checkpoint again, "
        "or take d2t from the draft's own training run."
    )
    tensors["d2t"] = torch.tensor([0, -2, 100, 0])
    save_file(tensors, tmp_path / "model.safetensors")
    assert refusal(lambda: load_draft(str(tmp_path))).startswith("d2t maps the draft's id 1 to -1, but")
    assert array("q").itemsize == 8


def test_pickle_in_place_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(zlab()))
    torch.save({"norm.weight": torch.zeros(64)}, tmp_path / "pytorch_model.bin")
    assert refusal(lambda: load_draft(str(tmp_path))) == (
        f"{tmp_path} has pytorch_model.bin, a pickle, where safetensors weights are due. A pickle can run "
        f"code "
        "when it is loaded, so this package never loads one as weights. Convert it to model.safetensors, or "
        "use a checkpoint published as safetensors."
    )


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    fix = "Give the folder that holds config.json, or a hub id such as z-lab/Qwen3-8B-DFlash-b16."
    for name in (str(absent), "./absent", "~/absent-draft", "a/b/c", "absent"):
        assert refusal(partial(load_draft, name)) == f"There is no folder {name}. {fix}"
    (tmp_path / "file").write_text("x")
    assert refusal(lambda: load_draft(str(tmp_path / "file"))) == (
        f"{tmp_path / 'file'} is a file. Give the folder that holds config.json, or a hub id."
    )
    assert refusal(lambda: load_draft(str(tmp_path))) == f"{tmp_path / 'config.json'} does not exist."
    (tmp_path / "config.json").write_text("{")
    assert refusal(lambda: load_draft(str(tmp_path))).startswith(f"{tmp_path / 'config.json'} is not valid JSON: ")
    too_long = refusal(lambda: load_draft("a" * 5000))
    assert "File name too long: 'aaa" in too_long and too_long.endswith("aaa'.") and len(too_long) < 900
    assert "is no usable path: it has a null byte." in refusal(lambda: load_draft("a\0b"))


def test_config_out_of_bounds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert refusal(lambda: load_draft(str(tmp_path))) == f"{tmp_path / 'config.json'} nests deeper than 32 levels."
    (tmp_path / "config.json").write_text('{"a": ' + "9" * 5000 + "}")
    assert refusal(lambda: load_draft(str(tmp_path))).startswith(f"{tmp_path / 'config.json'} is not valid JSON: ")
    (tmp_path / "config.json").write_bytes(b" " * (5 << 20))
    assert refusal(lambda: load_draft(str(tmp_path))) == (f"{tmp_path / 'config.json'} is larger than 4194304 bytes.")


LOAD = """
import json, sys
from vllm_dflash.checkpoint import CheckpointError, load_draft
results = []
for name, revision in json.loads(sys.argv[1]):
    try:
        draft = load_draft(name, revision)
        mask = None if draft.mask_embedding is None else float(draft.mask_embedding.sum())
        results.append([{n: list(t.shape) for n, t in draft.tensors.items()}, draft.folder is not None, mask])
    except CheckpointError as error:
        results.append(f"{error.finding.code}: {error}")
assert "vllm" not in sys.modules
print(json.dumps(results))
"""


def load_in_a_process(asked: list[tuple[str, str | None]], **environment: str) -> list[Any]:
    """load_draft of each (name, revision) in a process with this environment; the hub reads it at import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(asked)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hub(tmp_path: Path) -> None:
    whole = {name: list(shape) for name, shape in shapes(zlab()).items()}
    write_checkpoint(tmp_path / "hub/me/one", zlab(), shapes(zlab()))
    torch.save(torch.ones(64), tmp_path / "hub/me/one/mask_embedding.pt")
    sharded = write_checkpoint(tmp_path / "hub/me/sharded", zlab(), shapes(zlab()))
    (sharded / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [dict(list(shapes(zlab()).items())[:9]), dict(list(shapes(zlab()).items())[9:])]
    for name, part in zip(names, parts, strict=True):
        write_safetensors(sharded / name, part)
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    pickled = write_checkpoint(tmp_path / "hub/me/pickled", zlab(), {})
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (tmp_path / "hub/me/empty").mkdir()
    home = str(tmp_path / "home")

    with hub_server(tmp_path / "hub") as (endpoint, log):
        asked = [
            ("me/one", None),
            ("me/one", COMMIT),
            ("me/sharded", None),
            ("me/pickled", None),
            ("me/one", "next"),
            ("me/nobody", None),
            ("me/empty", None),
            ("me/forbidden", None),
        ]
        found = load_in_a_process(asked, HF_ENDPOINT=endpoint, HF_HOME=home)
        sent = sum(size for _, path, size in log if ".safetensors" in path)
    forbidden = "hub: The model me/forbidden could not be read from the hub: HfHubHTTPError: 403 Forbidden"
    assert found.pop().startswith(forbidden)
    assert found == [
        [whole, False, 64.0],
        [whole, False, 64.0],
        [whole, False, None],
        "pickle: me/pickled has pytorch_model.bin, a pickle, where safetensors weights are due. A pickle "
        "can run code when it is loaded, so this package never loads one as weights. Convert it to "
        "model.safetensors, or use a checkpoint published as safetensors.",
        "no_revision: The model me/one has no revision next on the hub.",
        "no_model: There is no folder me/nobody and no such model on the hub. Check the name; a private "
        "model needs a login or HF_TOKEN.",
        "missing_file: The model me/empty on the hub has no config.json.",
    ]
    assert 0 < sent < 500_000

    snapshot = tmp_path / f"home/hub/models--me--one/snapshots/{COMMIT}"
    (snapshot / "model.safetensors").write_bytes((tmp_path / "hub/me/one/model.safetensors").read_bytes())
    offline = load_in_a_process(
        [("me/one", None), ("me/sharded", None), ("me/other", None)],
        HF_ENDPOINT=endpoint, HF_HOME=home, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert offline == [
        [whole, True, 64.0],
        "offline: The weights of me/sharded are not in the hub's cache, and HF_HUB_OFFLINE is set. Download "
        "the model first, or give the path of a folder that holds it.",
        "offline: The model me/other is not in the hub's cache, and HF_HUB_OFFLINE is set. Download it "
        "first, or give the path of a folder that holds it.",
    ]
