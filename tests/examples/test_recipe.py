# SPDX-License-Identifier: Apache-2.0
"""The training recipe from end to end, at a tiny size: prompts, continuations (vLLM), features, training, export."""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from examples.smollm2 import export, features, prompts, train
from examples.smollm2.data import Sequence, load_sequences
from examples.smollm2.export import load_exported
from examples.smollm2.features import load_target
from examples.smollm2.replay import Replay
from tests.reference.config import read_config
from tests.reference.dflash import ReferenceDrafter
from tests.reference.speculate import speculate
from tests.reference.target import ReferenceTarget
from tests.support.checkpoints import DrafterShape, TargetShape, drafter_weights, make_target
from tests.support.engine import REPOSITORY, EngineProcess

TARGET = TargetShape("llama", vocab_size=272, tie_embeddings=True, mixing=0.3)
TAPS, STEPS = ["0", "1", "3"], 80

pytestmark = pytest.mark.engine


@dataclass
class Recipe:
    """The folder of one run, and the target it is for."""

    target: Path
    folder: Path

    def train(self, name: str, *more: str) -> None:
        train.train(
            train.parse(
                [
                    *("--target", str(self.target), "--tokens", str(self.folder / "tokens")),
                    *("--held-out", str(self.folder / "held-out"), "--out", str(self.folder / name)),
                    *("--taps", *TAPS, "--mask", "0", "--selector-rank", "8", "--warmup", "10"),
                    *("--sequences", "8", "--blocks", "8", "--evaluate-every", "40", "--rate", "4e-3"),
                    *more,
                ]
            )
        )

    def log(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / name / "log.jsonl").read_text().splitlines()]

    def exported(self, name: str) -> Path:
        out = self.folder / name / "exported"
        best = self.folder / name / "best.pt"
        export.main(["--target", str(self.target), "--best", str(best), "--out", str(out)])
        return out

    def held_out(self) -> list[Sequence]:
        return [s for s in load_sequences([self.folder / "held-out"]) if s.temperature == 0][:6]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Steps 1 to 4 for both architectures. The last shard of four is held out."""
    folder = tmp_path_factory.mktemp("recipe")
    target = make_target(folder / "target", TARGET)
    stdlib = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    prompts.main(["--out", str(folder / "prompts.jsonl"), "--count", "128", "--files", *stdlib])
    command = [sys.executable, "-m", "examples.smollm2.generate", "--target", str(target)]
    command += ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "tokens")]
    command += ["--max-tokens", "40", "--longest-prompt", "24", "--shard", "32", "--sequences", "64"]
    subprocess.run([*command, "--taps", *TAPS], check=True, cwd=REPOSITORY)
    (folder / "held-out").mkdir()
    for path in (folder / "tokens").glob("shard-00003.*"):
        path.rename(folder / "held-out" / path.name)
    recipe = Recipe(target, folder)
    for method in ("dflash", "dflash2"):
        recipe.train(method, "--method", method, "--steps", str(STEPS))
    return recipe


def reference_of(target: Path, drafter: Path) -> tuple[ReferenceTarget, ReferenceDrafter]:
    reference = ReferenceTarget(target, torch.float32)
    config = read_config(drafter, TARGET.num_layers)
    with safe_open(drafter / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}
    return reference, ReferenceDrafter(config, weights, reference)


def reference_acceptance(target: Path, drafter: Path, sequences: list[Sequence]) -> float:
    """Acceptance length of the plain loop over the prompts of `sequences`."""
    pair = reference_of(target, drafter)
    steps = [
        step
        for sequence in sequences
        for step in speculate(*pair, sequence.tokens[: sequence.prompt_length].tolist(), 32).steps
    ]
    return 1 + sum(step.accepted for step in steps) / len(steps)


def test_features_of_the_generation_are_a_second_forward(recipe: Recipe, tmp_path: Path) -> None:
    """What capture.py keeps inside vLLM against transformers; each runs in bf16, so rows differ by its rounding."""
    shutil.copy(recipe.folder / "held-out" / "shard-00003.npz", tmp_path)
    features.main(["--target", str(recipe.target), "--tokens", str(tmp_path), "--taps", *TAPS])
    (captured, again) = (load_sequences([folder]) for folder in (recipe.folder / "held-out", tmp_path))
    agreed = []
    for one, other in zip(captured, again, strict=True):
        run = slice(0, len(one.tokens) - 1)
        rows, expected = (torch.from_numpy(np.array(s.taps[run])).view(torch.bfloat16).float() for s in (one, other))
        assert ((rows - expected).norm(dim=-1) < 0.1 * expected.norm(dim=-1)).all()
        judged = slice(one.prompt_length - 1, len(one.tokens) - 1)
        agreed += (one.soft_ids[judged, 0] == other.soft_ids[judged, 0]).tolist()
        if one.temperature == 0:
            assert (one.soft_ids[judged, 0] == one.tokens[one.prompt_length :]).mean() > 0.95
    assert np.mean(agreed) > 0.95


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_loss_falls(recipe: Recipe, method: str) -> None:
    losses = [record["loss"] for record in recipe.log(method)]
    assert len(losses) == STEPS // 40
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_export_has_the_published_layout(recipe: Recipe, method: str) -> None:
    shape = DrafterShape(architecture=method, target_layer_ids=(0, 1, 3), intermediate_size=128)  # type: ignore[arg-type]
    published = drafter_weights(shape, TARGET)
    with safe_open(recipe.exported(method) / "model.safetensors", "pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}
    assert set(written) == set(published)
    assert {weight.dtype for weight in written.values()} == {torch.bfloat16}
    selector = "candidate_selector."
    for name, weight in written.items():
        if not name.startswith(selector):
            assert weight.shape == published[name].shape, name


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_trained_drafter_beats_its_random_start(recipe: Recipe, method: str) -> None:
    """Judged by the independent reference, on prompts of the held-out shard."""
    start = f"{method}-start"
    recipe.train(start, "--method", method, "--start", "random", "--steps", "1", "--rate", "0")
    sequences = recipe.held_out()
    before = reference_acceptance(recipe.target, recipe.exported(start), sequences)
    after = reference_acceptance(recipe.target, recipe.exported(method), sequences)
    assert after > before + 0.3


def test_replay_measures_what_the_loop_does(recipe: Recipe) -> None:
    """The early-stopping measure against the plain loop: same prompts, same continuations."""
    exported, sequences = recipe.exported("dflash2"), recipe.held_out()
    target = load_target(recipe.target, torch.float32)
    embeddings, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    replay = Replay(embeddings.detach(), head.detach(), torch.arange(TARGET.vocab_size))
    replayed = replay.acceptance_length(load_exported(exported), sequences)["all"]
    looped = reference_acceptance(recipe.target, exported, sequences)
    assert replayed == pytest.approx(looped, rel=0.15)


def test_training_goes_on_where_it_stopped(recipe: Recipe) -> None:
    recipe.train("resumed", "--steps", "40")
    recipe.train("resumed", "--steps", "80")
    assert [record["step"] for record in recipe.log("resumed")] == [40, 80]


def test_dflash_starts_dflash2(recipe: Recipe) -> None:
    """Its first step, at no learning rate, stands where the DFlash run ended."""
    warm = str(recipe.folder / "dflash" / "best.pt")
    recipe.train("warmed", "--method", "dflash2", "--warm", warm, "--steps", "1", "--rate", "0")
    one, other = (load_exported(recipe.exported(name)) for name in ("warmed", "dflash"))
    assert one.shape.is_dflash2 and torch.equal(one.fc.weight, other.fc.weight)
    assert torch.equal(one.layers[0].mlp_conv.base_kernel[:, 0], torch.ones(2, one.shape.hidden))


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_export_serves_in_vllm(
    recipe: Recipe, method: str, processes: Callable[..., EngineProcess], plugin: bool
) -> None:
    """vLLM's own counters against the reference's loop, on the prompts of the held-out shard."""
    exported, sequences = recipe.exported(method), recipe.held_out()
    expected = reference_acceptance(recipe.target, exported, sequences)
    process = processes(plugin=plugin)
    speculative = {"num_speculative_tokens": 7, "draft_sample_method": "greedy"}
    process.start(recipe.target, exported, speculative=speculative)
    inputs = [s.tokens[: s.prompt_length].tolist() for s in sequences]
    process.generate(inputs, {"temperature": 0, "max_tokens": 32, "ignore_eos": True})
    counted = process.counters()
    length = 1 + counted["spec_decode_num_accepted_tokens"] / counted["spec_decode_num_drafts"]
    assert length == pytest.approx(expected, rel=0.15)
