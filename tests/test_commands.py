# SPDX-License-Identifier: Apache-2.0
"""docs/commands.md: what every command prints for --help, word for word."""

import re
from pathlib import Path

import pytest

from vllm_dflash.cli import COMMANDS, main

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "commands.md"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_help_stands_in_the_document_as_it_prints(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    try:
        code = main([*command.split(), "--help"])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert not code
    printed = capsys.readouterr().out
    blocks = re.findall(r"```text\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert printed in blocks


def test_a_command_without_arguments_is_helped_and_an_unknown_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: vllm-dflash [--version] COMMAND ...")
    with pytest.raises(SystemExit) as stop:
        main(["serve"])
    assert stop.value.code == 2
    assert "invalid choice: 'serve'" in capsys.readouterr().err
