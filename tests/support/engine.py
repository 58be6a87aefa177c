# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a process of its own, driven from a test: the client side (engine_process.py is the other).

A process costs about eight seconds of imports, an engine in it two to four more. So tests share processes: one
`EngineProcess` serves one configuration after the other, and tells which runner and whether the plug-in serves.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

from tests.support.engine_process import Output, Trace
from vllm_dflash.checkpoint import CheckpointError, load_draft

REPOSITORY = Path(__file__).parents[2]
Runner = Literal["v1", "v2"]

LONGEST_CALL = 1800

# Keeps asynchronous scheduling on, which vLLM's CPU platform switches off (v2_on_cpu/interpreter_backend.py).
ASYNCHRONOUS = ("V2_ON_CPU_ASYNCHRONOUS", "1")

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "seed": 0,
    "disable_log_stats": False,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}


class EngineError(RuntimeError):
    """The process failed; the message ends with what it printed last."""


@dataclass
class EngineProcess:
    """One process with at most one engine at a time.

    runner: "v1", or "v2" under Triton's interpreter. plugin: whether vllm-dflash may load. in_process: the engine
    core runs in the same process (needed by `traces` and `probe`); otherwise vLLM starts it as its default is.
    threads: OpenMP threads; more than one only slows a tiny model down.
    """

    runner: Runner = "v1"
    plugin: bool = True
    in_process: bool = True
    threads: int = 1
    environment: Mapping[str, str] | tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self.connection, remote = Pipe()
        self.log = tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_process", str(remote.fileno())],
            cwd=REPOSITORY,
            env=self.variables(),
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        remote.close()

    def start(self, target: Path, drafter: Path | None = None, **arguments: Any) -> None:
        """Builds `vllm.LLM` for the pair, after ending the engine before. Keyword arguments are LLM's.

        `speculative` among them adds to (or replaces) the speculative config, whose method is dflash. Every request
        gets all its drafts, unless `additional_config` says otherwise. `traced=False` keeps no traces, which grow
        with every step.
        """
        speculative = arguments.pop("speculative", {})
        if ASYNCHRONOUS in tuple(dict(self.environment).items()):
            arguments.setdefault("async_scheduling", True)
        arguments = DEFAULTS | arguments | {"model": str(target)}
        options = arguments.get("additional_config", {}).get("dflash", {})
        if drafter is not None and "block_length" not in options:
            # A drafter that cannot be read is for the engine to refuse.
            with contextlib.suppress(CheckpointError):
                drafts = speculative.get("num_speculative_tokens") or load_draft(str(drafter)).config.num_draft_tokens
                arguments["additional_config"] = {"dflash": {"block_length": drafts} | options}
        if drafter is not None:
            arguments["speculative_config"] = {"method": "dflash", "model": str(drafter)} | speculative
        elif speculative:
            arguments["speculative_config"] = speculative
        self._ask("start", arguments)

    def generate(
        self, prompts: Sequence[Sequence[int] | str], sampling: dict[str, Any] | Sequence[dict[str, Any]]
    ) -> list[Output]:
        """Submits all prompts together; `sampling` is SamplingParams' keywords, one for all or one each."""
        return self._ask("generate", list(prompts), sampling if isinstance(sampling, dict) else list(sampling))

    def chat(self, conversations: Sequence[list[dict[str, str]]], sampling: dict[str, Any]) -> list[Output]:
        return self._ask("chat", list(conversations), sampling)

    def counters(self) -> dict[str, float]:
        """vLLM's counters since the engine started, by name, `vllm:` left out."""
        return self._ask("counters")

    def traces(self) -> dict[str, Trace]:
        """What was drafted and accepted, a request, since the last call. Keys are as `Output.request_id`."""
        return self._ask("traces")

    def probe(self, function: Callable[..., Any] | str, *arguments: Any, **options: Any) -> Any:
        """Runs a module-level function (itself, or "module:name") in the process with the LLM as first argument."""
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        return self._ask("probe", function, arguments, options)

    def stop(self) -> None:
        """Ends the engine; the process stays."""
        self._ask("stop")

    def close(self) -> None:
        """Ends the process, and with it every child it started."""
        close_all([self])

    def printed(self, last: int | None = None) -> str:
        """The text the process printed so far, or the last lines of it."""
        lines = Path(self.log.name).read_text(errors="replace").splitlines()
        return "\n".join(lines if last is None else lines[-last:])

    def _ask(self, command: str, *arguments: Any) -> Any:
        try:
            # Plain pickles: the connection's own pickler would share tensors' memory and fail on them.
            self.connection.send_bytes(pickle.dumps((command, arguments)))
            if not self.connection.poll(LONGEST_CALL):
                self.process.kill()
                raise EngineError(f"{command} took over {LONGEST_CALL} s\n{self.printed(60)}")
            succeeded, answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineError(f"the engine's process ended\n{self.printed(60)}") from error
        if not succeeded:
            raise EngineError(f"{answer}\n{self.printed(60)}")
        return answer

    def variables(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        environment |= {
            "VLLM_PLUGINS": "dflash" if self.plugin else "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.in_process else "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return environment | of_runner(self.runner) | dict(self.environment)


def of_runner(runner: Runner) -> dict[str, str]:
    """The environment variables that make vLLM on a CPU take this runner; V2 with Triton's interpreter."""
    if runner == "v1":
        return {}
    folder = str(Path(__file__).parent / "v2_on_cpu")
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "VLLM_USE_V2_MODEL_RUNNER": "1"}


class Processes:
    """The engine processes of a session, by their options: the same keywords give the same process again."""

    def __init__(self) -> None:
        self.running: dict[tuple, EngineProcess] = {}  # the one used last stands last

    def __call__(self, **options: Any) -> EngineProcess:
        key = tuple(sorted(options.items()))
        known = self.running.pop(key, None)
        self.running[key] = EngineProcess(**options) if known is None or known.process.poll() is not None else known
        return self.running[key]

    def keep(self, most: int) -> None:
        """Ends those that were not used for longest; an engine holds a gigabyte or two."""
        for key in list(self.running)[: max(0, len(self.running) - most)]:
            close_all([self.running.pop(key)])


def close_all(processes: Sequence[EngineProcess]) -> None:
    """Ends processes side by side: each takes some seconds to end its engine."""
    for one in processes:
        one.connection.close()
    for one in processes:
        try:
            one.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.log.close()
