# SPDX-License-Identifier: Apache-2.0
"""The pairs whose drafters were trained: tiny ones made here, and the demo pair."""

import fcntl
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support import checkpoints, training
from tests.support.checkpoints import DrafterShape, Pair, TargetShape

TRAINED = {
    "dflash": DrafterShape(architecture="dflash"),
    "dflash2": DrafterShape(architecture="dflash2"),
}


def trained_pair(cache: Path, shape: DrafterShape) -> Pair:
    """The pair from `cache`, or trained into it, once. Another shape or another recipe is another folder."""
    recipe = "".join(Path(module.__file__).read_text() for module in (checkpoints, training))
    name = hashlib.sha256(f"{shape}{recipe}".encode()).hexdigest()[:16]
    final = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test processes one trains
        if not final.exists():
            unfinished = cache / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            training.make_trained_pair(unfinished, shape)
            unfinished.rename(final)
    return Pair(final / "random" / "target", final / "trained", training.TRAINED_TARGET, shape)


@dataclass(frozen=True)
class DemoShape:
    """As much of a DrafterShape as the suites ask a demo drafter for."""

    architecture: str
    num_speculative_tokens: int
    layer_types: tuple[str, ...] | None


def demo_pair(folder: Path, architecture: str, scratch: Path) -> Pair:
    """The demo pair in `folder`. Its DFlash drafter is the DFlash 2 one without convolution and selector."""
    target, drafter = folder / "target", folder / "drafter"
    for part in (target, drafter):
        if not (part / "config.json").exists():
            raise FileNotFoundError(f"{part} holds no checkpoint; run `make demo-pair` first")
    config = json.loads((drafter / "config.json").read_text())
    if architecture == "dflash":
        drafter = _first_generation(drafter, scratch / "dflash", config)
    layer_types = tuple(config.get("layer_types") or ()) or None
    block_size = config.get("block_size") or config["dflash_config"]["block_size"]
    shape = DemoShape(architecture, block_size - 1, layer_types)
    return Pair(target.absolute(), drafter.absolute(), TargetShape("llama"), shape)  # type: ignore[arg-type]


def _first_generation(drafter: Path, directory: Path, config: dict) -> Path:
    if not directory.exists():
        directory.mkdir(parents=True)
        weights = {
            name: weight
            for name, weight in load_file(drafter / "model.safetensors").items()
            if "_conv." not in name and not name.startswith("candidate_selector.")
        }
        save_file(weights, directory / "model.safetensors")
        dropped = ("conv_", "selector_", "output_multiplier", "final_logit_softcapping")
        inner = {key: value for key, value in config["dflash_config"].items() if not key.startswith(dropped)}
        config = config | {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
        (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
