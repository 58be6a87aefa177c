# SPDX-License-Identifier: Apache-2.0
"""Random requests for a soak: shared beginnings, follow-up turns, sampling of all kinds, from one seed."""

import random
from dataclasses import dataclass, field
from typing import Any

SHARED_BEGINNINGS = 5
FOLLOW_UP_TURNS = 0.25


@dataclass
class SoakRequest:
    """One request as it is sent, and what came of it."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def greedy(self) -> bool:
        return self.sampling["temperature"] == 0


class Traffic:
    """Makes requests. vocabulary: ids 3 and up are text. longest: tokens of prompt and output together at most.

    options: whether requests carry their own most drafts.
    """

    prefix = "soak-"

    def __init__(self, seed: int, vocabulary: int, longest: int, options: bool) -> None:
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.longest = longest
        self.options = options
        self.made = 0
        self.finished: list[SoakRequest] = []
        self.beginnings = [self._text(self.random.choice((31, 32, 33, 64, 80))) for _ in range(SHARED_BEGINNINGS)]

    def _text(self, length: int) -> list[int]:
        return [self.random.randrange(3, self.vocabulary) for _ in range(length)]

    def next(self) -> SoakRequest:
        chance = self.random.random()
        if chance < FOLLOW_UP_TURNS and self.finished:
            before = self.random.choice(self.finished[-8:])
            prompt = before.prompt + before.tokens + self._text(self.random.randint(1, 9))
        elif chance < 0.6:
            prompt = self.random.choice(self.beginnings) + self._text(self.random.randint(1, 40))
        else:
            prompt = self._text(self.random.randint(1, 120))
        prompt = prompt[-(self.longest - 8) :]
        room = self.longest - len(prompt)
        self.made += 1
        return SoakRequest(f"{self.prefix}{self.made}", prompt, self._sampling(room))

    def _sampling(self, room: int) -> dict[str, Any]:
        pick = self.random
        sampling: dict[str, Any] = {
            "temperature": pick.choice((0, 0.7, 1.0, 1.0)),
            # Some run into the longest sequence.
            "max_tokens": room if pick.random() < 0.05 else min(room, pick.randint(1, 80)),
            "ignore_eos": pick.random() < 0.7,
        }
        if sampling["temperature"]:
            if pick.random() < 0.5:
                sampling["seed"] = pick.randrange(2**31)
            if pick.random() < 0.2:
                sampling["top_p"] = 0.9
            if pick.random() < 0.2:
                sampling["top_k"] = 8
        if pick.random() < 0.15:
            sampling["repetition_penalty"] = 1.2
        if pick.random() < 0.1:
            sampling["logprobs"] = 2
        if self.options and pick.random() < 0.3:
            sampling["extra_args"] = {"dflash": {"max_draft_tokens": pick.randint(0, 7)}}
        return sampling
