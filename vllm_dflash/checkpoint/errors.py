# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a checkpoint or a pair, as data first and as a sentence second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing found wrong, or worth knowing, about a checkpoint or a target/draft pair.

    `code` is stable and for programs; `what`, `why` and `fix` are sentences for the person at the terminal.
    An "error" cannot work or would draft badly without a word; a "warning" works, with a loss that is named.
    """

    code: str
    severity: Literal["error", "warning"]
    what: str
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.fix) if part)


def _cut(sentence: str, most: int) -> str:
    """Without its middle where it is longer: a checkpoint's own text may stand in it."""
    return sentence if len(sentence) <= most else f"{sentence[: most // 2]} ... {sentence[-most // 2 :]}"


class CheckpointError(ValueError):
    """A draft checkpoint (or a catalogue, or a target's config) that cannot be used; `finding` says why."""

    longest = 800  # characters of a sentence

    def __init__(self, code: str, what: str, why: str = "", fix: str = "") -> None:
        self.finding = Finding(code, "error", _cut(what, self.longest), _cut(why, self.longest), fix)
        super().__init__(str(self.finding))


class IncompatibleDraft(CheckpointError):
    """A draft that cannot draft for its target; `findings` holds every error that was found."""

    longest = 100_000

    def __init__(self, pair: str, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        listed = "".join(f"\n- {finding}" for finding in self.findings)
        super().__init__("incompatible", f"{pair}:{listed}")
