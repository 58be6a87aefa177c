# SPDX-License-Identifier: Apache-2.0
"""Step 1: training prompts, as JSON lines {"kind", "text"} or {"kind", "messages"}.

    python -m examples.smollm2.prompts --files STDLIB/*.py
    python -m examples.smollm2.prompts --files STDLIB/*.py --held-out --count 300

Code prefixes come from the files that the user names; all else is made of the templates in `words.toml`.
Prompts of the held-out split share no file and no topic with the training split.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from examples.smollm2.data import TRAINING

Prompt = dict[str, Any]
words = SimpleNamespace(**tomllib.loads(Path(__file__).with_name("words.toml").read_text()))
HELD_OUT_SHARE = 0.06


def is_held_out(key: str) -> bool:
    """Whether a file name, task or topic is in the held-out split: by its hash, so the same everywhere."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "little") / 2**32 < HELD_OUT_SHARE


def chat(text: str, system: str | None = None) -> Prompt:
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": [*first, {"role": "user", "content": text}]}


class Prompts:
    """Makes prompts of one split; every choice comes from one seeded generator."""

    def __init__(self, files: list[Path], held_out: bool, seed: int) -> None:
        self.rng = random.Random(f"{seed}-{held_out}")

        def split(entries: list[str]) -> list[str]:
            return [entry for entry in entries if is_held_out(entry) == held_out]

        self.files = [path for path in sorted(files) if is_held_out(path.name) == held_out]
        self.tasks, self.topics = split(words.code_tasks), split(words.topics)
        self.things = split(list(words.objects)) or list(words.objects)
        if not self.files:
            raise ValueError(f"none of the {len(files)} files falls into this split; name more files with --files.")

    def lines_of_file(self) -> list[str]:
        while True:
            path = self.rng.choice(self.files)
            lines = path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
            if len(lines) >= 8:
                return lines

    def snippet(self, shortest: int, longest: int) -> str:
        """Up to `longest` characters of a file, mostly from a definition on, cut at a line or within one."""
        lines = self.lines_of_file()
        starts = [i for i, line in enumerate(lines[:-4]) if line.lstrip().startswith(("def ", "class ", "import "))]
        start = self.rng.choice(starts) if starts and self.rng.random() < 0.8 else self.rng.randrange(len(lines) - 4)
        text = "".join(lines[start : start + 40])[: self.rng.randint(shortest, longest)]
        return text if self.rng.random() < 0.3 else text[: text.rfind("\n") + 1] or text

    def code(self) -> Prompt:
        rng = self.rng
        if rng.random() < 0.7:
            return {"text": self.snippet(80, 900)}
        name = f"{rng.choice(words.verbs)}_{rng.choice(words.nouns)}"
        arguments = rng.choice(words.arguments)
        start = rng.choice(words.function_starts).format(
            name=name,
            Class="".join(part.title() for part in name.split("_")[::-1]),
            camel=name.split("_")[0] + name.split("_")[1].title(),
            args=arguments,
            first=arguments.split(",")[0],
            doc=f"A function that {rng.choice(self.tasks)}.",
        )
        return {"text": start}

    def code_chat(self) -> Prompt:
        rng = self.rng
        if rng.random() < 0.2:
            return chat(f"{rng.choice(words.snippet_asks)}\n\n```python\n{self.snippet(100, 500).rstrip()}\n```")
        ask = rng.choice(words.code_asks).format(language=rng.choice(words.languages), task=rng.choice(self.tasks))
        return chat(ask, rng.choice(words.systems) if rng.random() < 0.2 else None)

    def chat(self) -> Prompt:
        rng = self.rng
        ask = rng.choice(words.chat_asks).format(topic=rng.choice(self.topics), other=rng.choice(self.topics))
        prompt = chat(ask, rng.choice(words.systems) if rng.random() < 0.2 else None)
        if rng.random() < 0.08:
            answer = f"{rng.choice(self.topics).capitalize()} is a wide field, and there is a lot to say about it."
            prompt["messages"] += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": rng.choice(words.follow_ups)},
            ]
        return prompt

    def fields(self) -> dict[str, str]:
        rng = self.rng
        thing = rng.choice(self.things)
        names = words.objects[thing].split()
        names = names[: rng.randint(3, len(names))]
        values = ", ".join(
            f"{name} {rng.choice(words.friends + words.cities + ['12', '3.5', '2024'])}" for name in names
        )
        return {
            "thing": thing,
            "table": thing.replace(" ", "_") + "s",
            "fields": ", ".join(names),
            "values": values,
            "first": names[0],
            "second": names[1],
            "topic": rng.choice(self.topics),
        }

    def json(self) -> Prompt:
        return chat(self.rng.choice(words.json_asks).format(**self.fields()))

    def sql(self) -> Prompt:
        return chat(self.rng.choice(words.sql_asks).format(**self.fields()))

    def tool(self) -> Prompt:
        rng = self.rng
        tools = [
            {"name": name, "parameters": dict.fromkeys(words.tools[name].split(), "string")}
            for name in rng.sample(list(words.tools), rng.randint(1, 4))
        ]
        city, city2 = rng.sample(words.cities, 2)
        ask = rng.choice(words.tool_asks).format(
            city=city,
            city2=city2,
            friend=rng.choice(words.friends),
            topic=rng.choice(self.topics),
            number=rng.randint(2, 900),
            number2=rng.randint(2, 90),
            first=rng.choice(words.nouns),
        )
        head = "You have these tools:\n" + "\n".join(json.dumps(tool) for tool in tools)
        rule = 'Answer with one JSON object {"name": ..., "arguments": {...}} and nothing else.'
        return chat(ask, f"{head}\n{rule}")

    def prose(self) -> Prompt:
        rng = self.rng
        topic, person = rng.choice(self.topics), rng.choice(words.persons)
        opening = rng.choice(words.openings).format(
            topic=topic,
            Topic=topic[0].upper() + topic[1:],
            other=rng.choice(self.topics),
            place=rng.choice(words.places),
            person=person,
            Person=person[0].upper() + person[1:],
            adjective=rng.choice(words.adjectives),
            moment=rng.choice(words.moments),
        )
        return {"text": opening}

    def make(self, kind: str) -> Prompt:
        maker: Callable[[], Prompt] = getattr(self, kind)
        return {"kind": kind, **maker()}


MIX = {"code": 0.27, "code_chat": 0.18, "chat": 0.28, "json": 0.08, "sql": 0.04, "tool": 0.03, "prose": 0.12}


def make_prompts(files: list[Path], count: int, held_out: bool, seed: int) -> list[Prompt]:
    """`count` distinct prompts of one split, mixed by `MIX`; fewer where the templates are exhausted."""
    source = Prompts(files, held_out, seed)
    kinds = source.rng.choices(list(MIX), weights=list(MIX.values()), k=count)
    seen: set[str] = set()
    prompts = []
    for kind in kinds:
        for _ in range(20):
            prompt = source.make(kind)
            key = json.dumps(prompt, sort_keys=True)
            if key not in seen:
                seen.add(key)
                prompts.append(prompt)
                break
    return prompts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to write (default .demo/training/prompts.jsonl)")
    parser.add_argument("--files", type=Path, nargs="+", required=True, help="source files for code prefixes")
    parser.add_argument("--count", type=int, default=12000, help="prompts to make")
    parser.add_argument("--held-out", action="store_true", help="make the held-out split instead")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    prompts = make_prompts(arguments.files, arguments.count, arguments.held_out, arguments.seed)
    out = arguments.out or TRAINING / ("held-out.jsonl" if arguments.held_out else "prompts.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    counts = {kind: sum(prompt["kind"] == kind for prompt in prompts) for kind in MIX}
    print(f"prompts: wrote {len(prompts)} to {out}: {counts}")


if __name__ == "__main__":
    main()
