# SPDX-License-Identifier: Apache-2.0
"""What `check` leans on in vLLM is there, and where it is not, it says so."""

from pathlib import Path

import pytest
import vllm

from vllm_dflash.engine import seams
from vllm_dflash.engine.inspection_seams import SEAMS


@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_each_point_holds_in_the_installed_vllm(seam: seams.Seam) -> None:
    assert seams.check(Path(vllm.__file__).parent, [seam]) == {seam: None}
