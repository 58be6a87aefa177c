# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request of a step gets, decided before anything is drawn."""


class DraftPlan:
    """Starts with K drafts for each of `count` requests; whoever knows a reason for fewer caps a row.

    A length that is decided before the drafts are drawn cannot depend on them, so that the row after the last one may
    give a bonus token: the output's distribution stays the target's.
    """

    def __init__(self, count: int, drafts: int) -> None:
        self.drafts = drafts
        self.lengths = [drafts] * count
        self._reasons: dict[int, str] = {}
        self._for_all: str | None = None

    def cap(self, row: int, length: int, reason: str) -> None:
        """At most `length` drafts for a row. The first reason that leaves none is the one that is counted."""
        self.lengths[row] = min(self.lengths[row], max(length, 0))
        if not self.lengths[row] and self._for_all is None:
            self._reasons.setdefault(row, reason)

    def skip_all(self, reason: str) -> None:
        """No drafts for anybody, quickly: most steps are such where drafting does not pay."""
        self.lengths = [0] * len(self.lengths)
        self._for_all = self._for_all or reason

    @property
    def rows(self) -> list[int]:
        """The rows that get drafts."""
        return [] if self._for_all else [row for row, length in enumerate(self.lengths) if length]

    @property
    def skipped(self) -> dict[str, int]:
        """Rows that get none, by reason."""
        counts: dict[str, int] = {}
        for reason in self._reasons.values():
            counts[reason] = counts.get(reason, 0) + 1
        rest = len(self.lengths) - len(self._reasons)
        if self._for_all and rest:
            counts[self._for_all] = counts.get(self._for_all, 0) + rest
        return counts
