# SPDX-License-Identifier: Apache-2.0
"""What a run has measured so far, on disk after every cell, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_dflash.bench.plan_of_run import Cell
from vllm_dflash.bench.server import BenchError


class Store:
    """The folder of one run: settings.json, and cells.jsonl with a line a finished cell."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Opens or makes the folder. Raises BenchError where it holds a run with other settings."""
        self.folder, self.settings = folder, settings
        self.cells: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        stored = folder / "settings.json"
        if stored.exists():
            before = json.loads(stored.read_text())
            changed = sorted(key for key in settings if before.get(key) != settings[key])
            if changed:
                raise BenchError(
                    f"{folder} holds a run with other settings ({', '.join(changed)} differ). Name another folder with "
                    "--out, or remove that one."
                )
        _write(stored, json.dumps(settings, indent=2))
        self._lines = folder / "cells.jsonl"
        if self._lines.exists():
            self._read()

    def _read(self) -> None:
        text = self._lines.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line was cut off while it was written
            _write(self._lines, whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            self.cells[entry["key"]] = entry

    def __contains__(self, cell: Cell) -> bool:
        return cell.key in self.cells

    def add(self, cell: Cell, figures: dict[str, Any]) -> None:
        """Keep a finished cell; it is on the disk when this returns."""
        entry = {"key": cell.key, "cell": json.loads(cell.key), "figures": figures}
        self.cells[cell.key] = entry
        with self._lines.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def figures(self, cell: Cell) -> dict[str, Any] | None:
        """What was measured of a cell, None if it is not done."""
        entry = self.cells.get(cell.key)
        return None if entry is None else entry["figures"]


def _write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
