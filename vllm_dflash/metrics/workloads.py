# SPDX-License-Identifier: Apache-2.0
"""The label `workload`: what a request calls itself, made safe and bounded in number."""

import re

DEFAULT, OTHER = "default", "other"
LONGEST = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:/-]")


class Workloads:
    """The first `most` names keep their own label, later ones share "other". No name is "default"."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.known: set[str] = set()

    def label(self, name: str | None) -> str:
        """The label of a request's name, at most LONGEST of A-Z a-z 0-9 _ . : / -, other characters as "_"."""
        if not name:
            return DEFAULT
        clean = _UNSAFE.sub("_", name[:LONGEST])
        if clean in (DEFAULT, OTHER) or clean in self.known:
            return clean
        if len(self.known) >= self.most:
            return OTHER
        self.known.add(clean)
        return clean
