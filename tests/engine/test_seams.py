# SPDX-License-Identifier: Apache-2.0
"""The seams: checked against source, applied only for DFlash, taken back for anything else."""

import re
from pathlib import Path
from typing import Any

import pytest
import vllm

from vllm_dflash.engine import activation, seams
from vllm_dflash.engine.seams import SEAMS, Seam, SeamError
from vllm_dflash.engine.versions import SUPPORTED, is_supported

ROOT = Path(vllm.__file__).parent


def held() -> dict[Seam, object]:
    """The object at each seam that has a replacement, as it is now."""
    found = {}
    for seam in SEAMS:
        if seam.ours is not None:
            owner, name = seams.owner_of(seam)
            found[seam] = getattr(owner, name)
    return found


@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_each_seam_holds_in_the_installed_vllm(seam: Seam) -> None:
    assert is_supported(vllm.__version__), f"this test is for vLLM {SUPPORTED}, installed is {vllm.__version__}"
    assert seams.check(ROOT, [seam]) == {seam: None}


def is_ours(value: Any) -> bool:
    """A class of this package, or a function whose code stands in it, under whatever name and module it goes."""
    code = getattr(value, "__code__", None)
    return value.__module__.startswith("vllm_dflash") or (code is not None and "vllm_dflash" in code.co_filename)


def copy_with(tmp_path: Path, seam: Seam, pattern: str, replacement: str) -> Path:
    """A folder with the seams' modules of the installed vLLM, one of them changed."""
    for other in SEAMS:
        relative = Path(*other.module.split(".")[1:]).with_suffix(".py")
        target = tmp_path / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / relative).read_text()
        if other.module == seam.module:
            text, count = re.subn(pattern, replacement, text)
            assert count, f"{pattern} does not occur in {seam.module}"
        target.write_text(text)
    return tmp_path


def test_a_changed_signature_is_one_message_with_versions_and_the_way_out(tmp_path: Path) -> None:
    seam = next(s for s in SEAMS if s.name == "RejectionSampler.apply_logits_processors")
    root = copy_with(
        tmp_path,
        seam,
        r"def apply_logits_processors\(\s*self,\s*logits",
        "def apply_logits_processors(self, scores",
    )
    with pytest.raises(SeamError) as error:
        seams.require(root, "0.99.0")
    assert str(error.value) == (
        "vllm-dflash does not fit vLLM 0.99.0: it is written for vLLM 0.32 and 0.33, and these points differ:\n"
        "- vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors: it takes (self, scores, "
        "sampling_metadata, metadata), expected (self, logits, sampling_metadata, metadata)\n"
        "Install a supported vLLM, or run stock vLLM by leaving dflash out of VLLM_PLUGINS (for example "
        "VLLM_PLUGINS='')."
    )


def test_a_missing_name_and_a_missing_module_are_found(tmp_path: Path) -> None:
    seam = next(s for s in SEAMS if s.name == "DFlashProposer")
    root = copy_with(tmp_path, seam, r"from vllm\.v1\.spec_decode\.dflash import DFlashProposer\n", "")
    assert seams.check(root, [seam]) == {seam: "DFlashProposer is missing"}
    (root / "v1/worker/gpu_model_runner.py").unlink()
    assert seams.check(root, [seam]) == {seam: "the module is missing"}


def test_nothing_is_applied_when_one_seam_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    activation.deactivate()
    before = held()
    broken = Seam("vllm.config.vllm", "VllmConfig.no_such_method", ("self",), None, "worker", "test")
    monkeypatch.setattr(seams, "SEAMS", (*SEAMS, broken))
    monkeypatch.setattr(seams.check, "__defaults__", ((*SEAMS, broken),))
    monkeypatch.setattr(activation, "_checked", False)
    with pytest.raises(SeamError, match=r"VllmConfig\.no_such_method: no_such_method is missing"):
        activation.activate("worker", "v1")
    assert held() == before


def test_only_two_pass_through_hooks_stand_until_a_dflash_configuration_is_seen() -> None:
    activation.install()
    activation.deactivate()
    stock = held()
    hooked = {seam for seam, value in stock.items() if is_ours(value)}
    assert {str(seam) for seam in hooked} == {str(s) for s in SEAMS if s.stage == "always"}

    for runner, other in (("v1", "v2"), ("v2", "v1")):
        activation.activate("worker", runner)
        active = held()
        for seam in active:
            if seam.stage != "always":
                assert (active[seam] is stock[seam]) == (seam.runner == other), f"{seam} for {runner}"

    activation.deactivate()
    assert held() == stock


def test_architectures_are_ours_only_while_active() -> None:
    from vllm import ModelRegistry

    activation.deactivate()
    stock = {name: ModelRegistry.models[name] for name in seams.ARCHITECTURES}
    activation.activate("config")
    assert {name: ModelRegistry.models[name] for name in seams.ARCHITECTURES} == stock
    activation.activate("worker", "v1")
    assert all("vllm_dflash" in str(ModelRegistry.models[name].module_name) for name in seams.ARCHITECTURES)
    activation.deactivate()
    assert {name: ModelRegistry.models[name] for name in seams.ARCHITECTURES} == stock
