# SPDX-License-Identifier: Apache-2.0
"""Every finding of `check`, once, and that it says of a pair what serving it does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from tests.check.broken import BROKEN, GOOD, LOSSY, Case
from tests.support.checkpoints import DrafterShape, Pair
from vllm_dflash import plugin
from vllm_dflash.check.command import findings_of
from vllm_dflash.engine import activation, inspection

Make = Callable[..., Pair]
SERVE = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 256}
# A config.json that names another size makes the tensors wrong too.
CONSEQUENCES = {"tensor_shapes", "missing_tensors", "unexpected_tensors", "fc_width", "no_lm_head", "no_d2t"}
NO_OPTIONS = SimpleNamespace(memory=None, target_weights=None)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    plugin.register()
    yield
    activation.deactivate()


def arguments(pair: Pair, case: Case) -> AsyncEngineArgs:
    speculative = {"method": "dflash", "model": str(pair.drafter)} | case.speculative
    return AsyncEngineArgs(model=str(pair.target), speculative_config=speculative, **(SERVE | case.serve))


def checked(pair: Pair, case: Case) -> tuple[inspection.Inspection, list[Any]]:
    looked = inspection.inspect(arguments(pair, case))
    return looked, findings_of(looked, NO_OPTIONS)[1]


def served(pair: Pair, case: Case) -> str | None:
    """What a server that starts with these arguments says when it refuses, None if it goes on to load."""
    try:
        arguments(pair, case).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_pair_gives_its_error_once_and_is_not_served(make: Make, tmp_path: Path, case: Case) -> None:
    pair = case.write(make(case.shape), tmp_path / "drafter")
    _, findings = checked(pair, case)
    codes = [finding.code for finding in findings if finding.severity == "error"]
    assert codes.count(case.code) == 1
    assert set(codes) - {case.code} <= CONSEQUENCES
    if case.code == "method":
        return  # another method is served; it is not what was asked of `check`
    refusal = served(pair, case)
    assert refusal is not None
    (error,) = [finding for finding in findings if finding.code == case.code]
    if case.code not in ("configuration", "target"):
        assert error.what in refusal
        assert error.fix in refusal


@pytest.mark.parametrize("case", LOSSY, ids=str)
def test_a_lossy_pair_gives_one_warning_and_is_served(make: Make, tmp_path: Path, case: Case) -> None:
    pair = case.write(make(case.shape), tmp_path / "drafter")
    case = case if case.code != "max_position_embeddings" else Case(case.code, serve={"max_model_len": 128})
    looked, findings = checked(pair, case)
    assert [(finding.code, finding.severity) for finding in findings] == [(case.code, "warning")]
    assert looked.settings is not None
    assert served(pair, case) is None


@pytest.mark.parametrize("name", GOOD)
def test_a_good_pair_gives_no_finding_and_is_served(make: Make, name: str) -> None:
    pair = make(GOOD[name])
    looked, findings = checked(pair, Case(""))
    assert findings == []
    assert served(pair, Case("")) is None
    settings = looked.settings
    assert settings is not None and looked.draft is not None
    assert settings.num_speculative_tokens == looked.draft.config.num_draft_tokens
    assert (settings.runner, settings.target_backend, settings.draft_backend) == ("V1", "CPU_ATTN", "CPU_ATTN")


def test_sizes_by_hand(make: Make) -> None:
    shape = DrafterShape(architecture="dflash2", layer_types=("sliding_attention", "full_attention"), sliding_window=32)
    looked = inspection.inspect(arguments(make(shape), Case("")))
    gib = 1 << 30
    sizes, _ = findings_of(looked, SimpleNamespace(memory=1.0, target_weights=0.25))
    assert sizes is not None and looked.settings is not None
    # 4 target layers, 2 draft layers; 2 key heads of 32 numbers, keys and values, 4 bytes.
    assert sizes.target_kv_bytes_per_token == 4 * 2 * 2 * 32 * 4
    assert sizes.draft_kv_bytes_per_token == 2 * 2 * 2 * 32 * 4
    # 64 tokens, of which one draft layer keeps its window of 32.
    assert sizes.request_bytes == 64 * sizes.target_kv_bytes_per_token + (64 + 32) * 512
    assert sizes.q_dense == 4 * 7 * 128 * 4
    assert sizes.q_sparse == 4 * 7 * 8 * 12
    left = int(gib * looked.settings.memory_share) - gib // 4 - sizes.draft_weights
    assert sizes.kv_bytes == left
    assert sizes.requests_that_fit == left // sizes.request_bytes
    assert sizes.draft_weights == sum(f.stat().st_size for f in (looked.draft.folder).glob("*.safetensors")) - header(
        looked.draft.folder / "model.safetensors"
    )


def header(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@pytest.mark.parametrize(
    ("memory", "weights", "words"),
    [(1.0, 2.0, "no room for any KV"), (0.0006, 0.00001, "One request of 64 tokens takes")],
)
def test_too_little_memory_is_an_error(make: Make, memory: float, weights: float, words: str) -> None:
    looked = inspection.inspect(arguments(make(GOOD["DFlash"]), Case("")))
    _, findings = findings_of(looked, SimpleNamespace(memory=memory, target_weights=weights))
    (finding,) = findings
    assert (finding.code, finding.severity) == ("memory", "error")
    assert words in str(finding)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("broken", [False, True], ids=["good", "broken"])
def test_real_engines_start_or_refuse_as_check_says(make: Make, tmp_path: Path, serving: Any, broken: bool) -> None:
    from tests.support.engine import EngineError

    cases = (
        [case for case in BROKEN if case.code != "method"] if broken else [Case("", shape) for shape in GOOD.values()]
    )
    for number, case in enumerate(cases):
        pair = case.write(make(case.shape), tmp_path / str(number))
        engine = serving.process(case.shape)
        start = lambda: engine.start(pair.target, pair.drafter, speculative=case.speculative, **(SERVE | case.serve))  # noqa: B023, E731
        if broken:
            with pytest.raises(EngineError):
                start()
        else:
            start()
            assert engine.generate([[5, 6, 7]], {"max_tokens": 8, "temperature": 0, "ignore_eos": True})
