# SPDX-License-Identifier: Apache-2.0
"""Serve the demo pair with its drafter and without, stream three prompts through the OpenAI API, and compare.

python -m examples.demo [--target FOLDER] [--speculative-config JSON]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from examples.demo.api import Answer, Speculation, read_speculation, stream_answer
from examples.demo.server import Server, ServerFailed

NAME = "smollm2"
MAX_TOKENS = 160
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "List three things to check before a long bicycle ride, each with one sentence.",
)


@dataclass(frozen=True)
class Result:
    """What one server did with the three prompts."""

    answers: list[Answer]
    speculation: Speculation

    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / sum(answer.seconds for answer in self.answers)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--speculative-config", default='{"method": "dflash", "model": ".demo/drafter"}')
    parser.add_argument("--dtype", default="bfloat16", help="the same for both servers")
    parser.add_argument("--logs", type=Path, default=Path(".demo"), help="where the servers' logs go")
    return parser.parse_args()


def show_piece(piece: str) -> None:
    print(piece.replace("\n", "\n  | "), end="", flush=True)


def ask_all(url: str, visible: bool) -> Result:
    """One unmeasured request, then the three prompts, one after the other."""
    show = show_piece if visible else lambda piece: None
    stream_answer(url, NAME, "Hello!", 16, lambda piece: None)
    before = read_speculation(url)
    answers = []
    for prompt in PROMPTS:
        if visible:
            print(f"\n  > {prompt}\n  | ", end="", flush=True)
        answers.append(stream_answer(url, NAME, prompt, MAX_TOKENS, show))
        if visible:
            print()
    return Result(answers, read_speculation(url).since(before))


def print_table(method: str, dtype: str, drafted: Result, plain: Result) -> None:
    rows = ((f"with {method}", drafted), ("without", plain))
    width = max(len(name) for name, _ in rows)
    print(f"\n  {'':{width}}  tokens/s  acceptance length")
    for name, result in rows:
        speed, length = result.tokens_per_second(), result.speculation.acceptance_length()
        print(f"  {name:{width}}  {speed:8.1f}  {length:17.2f}")
    pairs = zip(drafted.answers, plain.answers, strict=True)
    same = sum(one.text == other.text for one, other in pairs)
    ratio = drafted.tokens_per_second() / plain.tokens_per_second()
    print(f"\n  {ratio:.2f} times the plain speed; {same} of {len(PROMPTS)} answers are the same text.")
    print("  Acceptance length: tokens a step of the target, its own included (plain: 1.00).")
    if same < len(PROMPTS) and dtype != "float32":
        print(f"  In {dtype}, rows verified together round otherwise than one by one, so near-ties can fall otherwise:")
        print('  make demo DEMO_ARGS="--dtype float32" shows the same text.')


def run(arguments: argparse.Namespace) -> None:
    method = json.loads(arguments.speculative_config).get("method", "a draft model")
    common = ["--served-model-name", NAME, "--dtype", arguments.dtype]
    speculative = ["--speculative-config", arguments.speculative_config]
    print(f"vllm serve {arguments.target} --speculative-config '{arguments.speculative_config}'", flush=True)
    log = arguments.logs / "server-speculating.log"
    with Server(arguments.target, f"with {method}", log, [*common, *speculative]) as server:
        drafted = ask_all(server.url, visible=True)
    if drafted.speculation.drafts == 0:
        raise ServerFailed(f"The server answered, but it drafted nothing; its log is {log}.")
    print(f"\nvllm serve {arguments.target}   (the same prompts, without a drafter)", flush=True)
    with Server(arguments.target, "without", arguments.logs / "server-plain.log", common) as server:
        plain = ask_all(server.url, visible=False)
    print_table(method, arguments.dtype, drafted, plain)


def main() -> int:
    # A shell starts background jobs with SIGINT ignored, and a child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is served lies on the disk
    try:
        run(parse_arguments())
    except KeyboardInterrupt:
        print("\ndemo: interrupted; its server is stopped.", file=sys.stderr)
        return 130
    except (ServerFailed, httpx.HTTPError) as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
