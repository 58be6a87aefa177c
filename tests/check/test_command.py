# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash check` as a user runs it: words, JSON, exit codes, a GPU that is not here."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.check.broken import BROKEN, LOSSY
from tests.support.checkpoints import DrafterShape, Pair
from vllm_dflash.engine.inspection import engine_args
from vllm_dflash.engine.named_gpu import GIB, parse_gpu

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from vllm_dflash.cli import main; sys.exit(main())", "check"]
Make = Callable[..., Pair]


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_a_server_with_a_gpu_that_is_not_here(make: Make) -> None:
    """The runner, the backends and the batch as on an H100; more drafts than the scheduler's budget holds."""
    pair = make(DrafterShape(architecture="dflash2"))
    run = check(pair.target, pair.drafter, "--gpu", "h100", "--strict", "--json", "--max-num-batched-tokens", 2048)
    assert run.returncode == 1, run.stderr
    told = json.loads(run.stdout)
    settings = told["settings"]
    assert (settings["runner"], settings["max_num_seqs"], settings["memory"]) == ("V2", 1024, 80 * GIB)
    assert settings["draft_backend"] == "FLASH_ATTN"
    assert "batched_tokens" in [finding["code"] for finding in told["findings"]]
    assert told["sizes"]["requests_that_fit"] > 1000


def test_fp8_kv_for_a_non_causal_draft_on_an_old_gpu_names_the_way_out(make: Make) -> None:
    """vllm#41559: no backend takes non-causal drafts with quantised KV there."""
    pair = make(DrafterShape(architecture="dflash2"))
    backend = '{"method": "dflash", "attention_backend": "FLASH_ATTN"}'
    arguments = ("--gpu", "a100", "--kv-cache-dtype", "fp8", "--speculative-config", backend)
    run = check(pair.target, pair.drafter, *arguments)
    assert run.returncode == 2, run.stderr
    text = " ".join(run.stdout.split())
    assert "No attention backend serves the draft's non-causal attention here (KV cache fp8)" in text
    assert '"kv_cache_dtype": "auto"' in text
    assert run.stdout.rstrip().splitlines()[-1].startswith("This pair will not work: 1 error")


def test_the_draft_comes_from_a_catalogue_and_contradictions_are_usage_errors(make: Make, tmp_path: Path) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    catalogue = tmp_path / "pairs.json"
    catalogue.write_text(json.dumps({"pairs": [{"target": str(pair.target), "draft": str(pair.drafter)}]}))
    run = check(pair.target, "--additional-config", json.dumps({"dflash": {"catalog": str(catalogue)}}))
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{pair.drafter}: DFlash 2" in run.stdout
    with pytest.raises(ValueError) as error:
        engine_args(str(pair.target), str(pair.drafter), ["--speculative-config", '{"model": "another/draft"}'])
    assert str(error.value) == f"The draft is named twice: {pair.drafter}, and another/draft in --speculative-config."


def test_gpus_by_name_and_by_number() -> None:
    assert parse_gpu("NVIDIA RTX 4090").capability == (8, 9)
    assert parse_gpu("9.0:80").memory == 80 * GIB
    with pytest.raises(ValueError, match=r"^'tpu' is no GPU known here\. Give its compute capability"):
        parse_gpu("tpu")


def test_every_finding_of_the_pair_checks_has_its_case() -> None:
    sources = [ROOT / "vllm_dflash" / "checkpoint" / name for name in ("compatibility.py", "weights.py")]
    written = "".join(source.read_text() for source in sources)
    codes = set(re.findall(r'Finding\(\s*"([a-z0-9_]+)"', written))
    assert len(codes) > 15
    assert codes - {case.code for case in (*BROKEN, *LOSSY)} == set()
