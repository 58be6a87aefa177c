# SPDX-License-Identifier: Apache-2.0
"""What the metrics must have counted, from the answers of a server with --per-request-spec-decode-metrics detailed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.metrics.scrape import Scrape

PREFIX = "vllm_dflash:"


@dataclass
class Counts:
    """Counts of some answers.

    steps: verifications by (drafts, accepted ones). tokens, prompts: tokens generated and requests answered.
    """

    steps: Counter[tuple[int, int]] = field(default_factory=Counter)
    tokens: int = 0
    prompts: int = 0

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> Counts:
        counts = cls()
        for answer in answers:
            spec = answer["metrics"]["speculative_decoding"]
            counts.steps.update(zip(spec.get("per_step_drafted", ()), spec.get("per_step_accepted", ()), strict=True))
            counts.tokens += answer["usage"]["completion_tokens"]
            counts.prompts += 1
        return counts

    def lengths(self) -> dict[float, float]:
        """Acceptance lengths of verified blocks."""
        lengths: Counter[float] = Counter()
        for (drafted, accepted), steps in self.steps.items():
            if drafted:
                lengths[accepted + 1.0] += steps
        return dict(lengths)

    def blocks(self) -> dict[float, float]:
        blocks: Counter[float] = Counter()
        for (drafted, _), steps in self.steps.items():
            blocks[float(drafted)] += steps
        return dict(blocks)

    def at_position(self, of: int) -> dict[str, float]:
        """By position, drafts (of=0) or accepted ones (of=1)."""
        at: Counter[str] = Counter()
        for pair, steps in self.steps.items():
            for position in range(1, pair[of] + 1):
                at[str(position)] += steps
        return dict(at)


@dataclass
class Difference:
    """What was counted between two scrapes."""

    before: Scrape
    after: Scrape

    def sum(self, name: str, **labels: str) -> float:
        return self.after.sum(name, **labels) - self.before.sum(name, **labels)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        return _minus(self.after.by(name, label, **labels), self.before.by(name, label, **labels))

    def histogram(self, name: str, **labels: str) -> dict[float, float]:
        return _minus(self.after.histogram(name, **labels), self.before.histogram(name, **labels))


def _minus(after: dict, before: dict) -> dict:
    return {key: value for key in after if (value := after[key] - before.get(key, 0))}


def check_drafts(counted: Difference | Scrape, expected: Counts, **labels: str) -> None:
    """The metrics by request and position against the answers' own counts. labels: of the series to look at."""
    length = f"{PREFIX}acceptance_length_tokens"
    assert counted.histogram(length, **labels) == expected.lengths()
    assert counted.sum(f"{length}_sum", **labels) == sum(at * steps for at, steps in expected.lengths().items())
    assert counted.sum(f"{length}_count", **labels) == sum(expected.lengths().values())
    assert counted.by(f"{PREFIX}draft_tokens_total", "position", **labels) == expected.at_position(0)
    assert counted.by(f"{PREFIX}accepted_tokens_total", "position", **labels) == expected.at_position(1)
