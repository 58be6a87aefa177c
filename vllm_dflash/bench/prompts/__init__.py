# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: the shipped ones or the user's, with as much context before them as a cell asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

SHIPPED = ("code", "chat", "json", "sql", "tools", "prose")
CHARACTERS_PER_TOKEN = 4
_PLACES = ("Aarhus", "Bergen", "Cork", "Delft", "Evora", "Fez", "Ghent", "Haifa", "Izmir", "Jaffa", "Kyoto", "Lucca")
_THINGS = ("barley", "copper", "dyes", "glass", "hemp", "ivory", "lead", "oil", "paper", "resin", "salt", "wool")
_EVENTS = (
    "The harbour master of {place} counted {number} ships and noted that the price of {thing} had fallen again.",
    "On the road to {place} a carrier lost {number} bales of {thing} and was asked to pay for half of them.",
    "The council in {place} raised the duty on {thing} to {number} and the merchants answered with a long petition.",
    "A letter from {place} describes {number} days of rain, a broken bridge, and a store of {thing} that went mouldy.",
    "In {place} the guild admitted {number} new members, most of whom traded in {thing}.",
)


def read_prompts(path: Path | None) -> dict[str, list[str]]:
    """Workload -> prompts. A file has one JSON object a line: {"prompt": ..., "workload": ...}, the second if wanted.

    Raises ValueError, a sentence with the line.
    """
    if path is None:
        text = files("vllm_dflash.bench.prompts").joinpath("prompts.jsonl").read_text()
    else:
        try:
            text = path.read_text()
        except OSError as error:
            raise ValueError(f"The prompts {path} cannot be read: {error.strerror}.") from None
    found: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}.") from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{path}, line {number}: an object with a text "prompt" is due.')
        found.setdefault(str(entry.get("workload", "prompts")), []).append(prompt)
    if not found:
        raise ValueError(f"The prompts {path} hold none.")
    return found


def background(tokens: int, seed: int) -> str:
    """About that many tokens of varied text (4 characters each), the same for the same seed; "" for none."""
    draw = random.Random(seed)
    lines, length = [], 0
    while length < tokens * CHARACTERS_PER_TOKEN:
        event = draw.choice(_EVENTS)
        line = event.format(place=draw.choice(_PLACES), thing=draw.choice(_THINGS), number=draw.randrange(2, 900))
        lines.append(line)
        length += len(line) + 1
    return " ".join(lines)


def with_context(prompts: Sequence[str], tokens: int, count: int) -> list[str]:
    """`count` prompts, in turn, each after a background text of its own of about `tokens` tokens."""
    made = []
    for number in range(count):
        prompt = prompts[number % len(prompts)]
        if tokens:
            prompt = f"Notes from an archive:\n{background(tokens, number)}\n\nAside from these notes: {prompt}"
        elif number >= len(prompts):
            prompt = f"{prompt}\n(Variant {number // len(prompts) + 1}.)"
        made.append(prompt)
    return made
