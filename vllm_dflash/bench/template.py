# SPDX-License-Identifier: Apache-2.0
"""The target's chat template and its thinking mode: found out, fixed for all groups, and told."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint.hub import fetch_file

# The keyword that templates take for it, as Qwen's and those that follow it do.
THINKING = "enable_thinking"


@dataclass(frozen=True)
class Template:
    """How prompts become text. mode: "server" (the chat template) or "none" (as they are)."""

    mode: str
    arguments: dict[str, Any]
    told: str


def find_template(target: str, thinking: bool, raw: bool) -> Template:
    """The template of a target in a folder or on the hub; `raw` leaves it aside."""
    if raw:
        return Template("none", {}, "none: prompts are sent as they are (--raw)")
    text = _template_text(target)
    if text is None:
        return Template("none", {}, "none: the target has no chat template, prompts are sent as they are")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    if THINKING not in text:
        return Template("server", {}, f"the target's own (sha256 {digest}), which has no thinking mode")
    mode = "on" if thinking else "off"
    return Template("server", {THINKING: thinking}, f"the target's own (sha256 {digest}), thinking {mode}")


def _template_text(target: str) -> str | None:
    file = _file(target, "chat_template.jinja")
    if file is not None:
        return file.read_text()
    file = _file(target, "tokenizer_config.json")
    stated = json.loads(file.read_text()).get("chat_template") if file is not None else None
    return stated if isinstance(stated, str) else json.dumps(stated) if stated else None


def _file(target: str, name: str) -> Path | None:
    folder = Path(target).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).exists() else None
    return fetch_file(target, name, None)
