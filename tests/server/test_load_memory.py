# SPDX-License-Identifier: Apache-2.0
"""Memory that ends while the drafter loads: the server ends too, and names the drafter and its size."""

import json
import resource
import subprocess
from pathlib import Path

import pytest

from tests.checkpoint.samples import write_checkpoint
from tests.support.server import Server
from vllm_dflash.bench.child import cause
from vllm_dflash.checkpoint import parse_config, required_tensors
from vllm_dflash.checkpoint.safetensors_header import read_folder, tensor_bytes

MEMORY = 8 << 30
WIDTH = 1 << 24  # of the MLP: 4 GiB a matrix, in a file that takes no disk


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


@pytest.mark.engine
def test_a_drafter_that_is_larger_than_the_memory(trained, tmp_path: Path) -> None:
    pair = trained("dflash2")
    raw = json.loads((pair.drafter / "config.json").read_text()) | {"intermediate_size": WIDTH}
    tensors = required_tensors(parse_config(raw), vocab_size=pair.target_shape.vocab_size)
    write_checkpoint(tmp_path / "drafter", raw, tensors, dict.fromkeys(tensors, "F32"))
    server = Server(pair.target, tmp_path / "drafter", "--dtype", "float32")
    log = tmp_path / "log"
    with log.open("w") as said:
        ended = subprocess.run(
            server.command,
            env=server.environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            preexec_fn=limited,
            timeout=600,
        )
    assert ended.returncode != 0
    size = sum(tensor_bytes(tensor) for tensor in read_folder(tmp_path / "drafter").values())
    assert size > 2 * MEMORY
    sentence = cause(log)
    assert sentence is not None
    assert sentence.startswith("OutOfMemoryError: Memory ran out while the drafter was loaded")
    assert f"{tmp_path / 'drafter'} holds {size / 2**30:.2f} GiB of weights" in sentence
    assert "vllm-dflash check" in sentence
