# SPDX-License-Identifier: Apache-2.0
"""Options under "dflash" in --additional-config."""

import pytest

from vllm_dflash.options import server_options


def test_no_options_are_the_defaults() -> None:
    assert server_options({}) == server_options(None) == server_options({"other": 1})


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError) as error:
        server_options({"dflash": {"catalogue": "x"}})
    assert str(error.value) == (
        "\"dflash\" in --additional-config: catalogue: Extra inputs are not permitted (given: 'x'). "
        "Known options: catalog."
    )


def test_options_that_are_no_object_are_refused() -> None:
    with pytest.raises(ValueError, match="must be an object"):
        server_options({"dflash": True})
