# SPDX-License-Identifier: Apache-2.0
"""What a user meets before or instead of a measurement, as sentences."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import DrafterShape, Pair
from vllm_dflash.bench.child import cause
from vllm_dflash.bench.prompts import background, read_prompts, with_context
from vllm_dflash.bench.server import BenchError, Server, require_device
from vllm_dflash.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *map(str, arguments)])
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1].removeprefix("vllm-dflash bench: error: ")


def test_a_cuda_build_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match=r"^No GPU is visible, and the installed vLLM 0\.32\.0 is a CUDA build"):
        require_device("0.32.0")
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    command.chmod(0o755)
    assert require_device("0.32.0") == "GPU 0: NVIDIA H200"
    assert require_device("0.32.0+cpu").startswith("CPU (")


def test_missing_models_and_wrong_words(
    capsys: pytest.CaptureFixture[str], make: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    gone, out = tmp_path / "gone", ("--out", tmp_path / "out")
    sentence = "Give the folder that holds config.json, or a hub id such as z-lab/Qwen3-8B-DFlash-b16."
    assert refused(capsys, gone, *out) == f"There is no folder {gone}. {sentence}"
    assert refused(capsys, pair.target, gone, *out) == f"There is no folder {gone}. {sentence}"
    for option in ("--draft-model", "--eagle3"):
        assert refused(capsys, pair.target, option, gone, *out) == f"There is no folder {gone}. {sentence}"
    assert refused(capsys, pair.target, pair.drafter, "--groups", "medusa", *out) == (
        "There is no group medusa here; there are plain, ngram, stock-dflash2, dflash2."
    )
    assert refused(capsys, pair.target, "--workloads", "poems", *out).startswith("There is no workload poems among")
    assert refused(capsys, pair.target, "--concurrency", "0", *out) == "--concurrency is '0'; the smallest is 1."
    assert refused(capsys, pair.target, "--contexts", "huge", *out).startswith("--contexts has 'huge'; it takes short")
    assert not (tmp_path / "out").exists()


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], make: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make(DrafterShape(architecture="dflash2"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused(capsys, pair.target, "--port", port, "--out", tmp_path / "out") == (
            f"Port {port} of 127.0.0.1 cannot be used: Address already in use. Leave --port out to take a free one."
        )


@pytest.mark.engine
def test_a_server_that_dies_is_told_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["UnheardOfForCausalLM"], "model_type": "llama"}')
    log = tmp_path / "logs" / "plain.log"
    with pytest.raises(BenchError) as error, Server(str(tmp_path), "plain", [], log, stock=True):
        pass
    first, *rest = str(error.value).splitlines()
    assert first.startswith("The server of the group plain ended with code ")
    assert "UnheardOfForCausalLM" in first
    assert first.endswith(f"The last lines of {log}:")
    assert "UnheardOfForCausalLM" in "\n".join(rest)


def test_what_a_server_raised_first_is_found_above_what_follows_from_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO 11-30 05:00:00 [api.py:1] starting\n")
    assert cause(log) is None
    core = "(EngineCore pid=7) ERROR 11-30 05:00:01 [core.py:1146] "
    log.write_text(
        f"{core}Traceback (most recent call last):\n{core}torch.OutOfMemoryError: Memory ran out.\n"
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core: {}\n"
    )
    assert cause(log) == "OutOfMemoryError: Memory ran out."
    log.write_text(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n"
        "  Value error, K is 8; the block has 7. [type=value_error, input_value={}, input_type=dict]\n"
    )
    assert cause(log) == "ValidationError: K is 8; the block has 7."


def test_shipped_prompts_cover_six_workloads_and_context_is_varied() -> None:
    prompts = read_prompts(None)
    assert {name: len(several) for name, several in prompts.items()} == dict.fromkeys(
        ("code", "chat", "json", "sql", "tools", "prose"), 6
    )
    made = with_context(prompts["code"], 500, 8)
    assert len(made) == len(set(made)) == 8
    assert all(2000 <= len(one) - len(prompts["code"][n % 6]) <= 2300 for n, one in enumerate(made))
    assert background(200, 1) == background(200, 1) != background(200, 2)
    assert len(set(with_context(prompts["sql"], 0, 20))) == 20


def test_a_users_prompts(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "workload": "mine"}\n\n{"prompt": "b"}\n')
    assert read_prompts(file) == {"mine": ["a"], "prompts": ["b"]}
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r'line 2: an object with a text "prompt" is due\.$'):
        read_prompts(file)
