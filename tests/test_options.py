# SPDX-License-Identifier: Apache-2.0
"""Options under "dflash": the server's in --additional-config, a request's in its extra_args."""

import pytest

from vllm_dflash.options import RequestOptionError, RequestOptions, ServerOptions, request_options, server_options


def test_no_options_are_the_defaults() -> None:
    assert server_options({}) == server_options(None) == server_options({"other": 1})


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError) as error:
        server_options({"dflash": {"catalogue": "x"}})
    assert str(error.value) == (
        "\"dflash\" in --additional-config: catalogue: Extra inputs are not permitted (given: 'x'). "
        f"Known options: {', '.join(sorted(ServerOptions.model_fields))}."
    )
    assert {"catalog", "metrics", "workloads"} <= set(ServerOptions.model_fields)


def test_options_that_are_no_object_are_refused() -> None:
    with pytest.raises(ValueError, match="must be an object"):
        server_options({"dflash": True})


@pytest.mark.parametrize(
    "extra_args",
    [
        {"dflash": {"max_draft_tokens": 3, "workload": "chat"}},
        {"dflash": '{"max_draft_tokens": 3, "workload": "chat"}'},
        {"dflash.max_draft_tokens": 3, "dflash.workload": "chat"},
        {"dflash": {"max_draft_tokens": 3}, "dflash.workload": "chat", "session_id": "s", "dflashed": 1},
        {"dflash": {"max_draft_tokens": 3, "workload": "chat"}, "dflash.max_draft_tokens": 3},
    ],
)
def test_a_requests_options_in_each_spelling(extra_args) -> None:
    assert request_options(extra_args) == RequestOptions(max_draft_tokens=3, workload="chat")


@pytest.mark.parametrize("extra_args", [None, {}, {"session_id": "s"}, {"dflash": {}}, {"dflash": "{}"}])
def test_a_request_without_options_has_the_defaults(extra_args) -> None:
    assert request_options(extra_args) == RequestOptions(max_draft_tokens=None, workload=None)


@pytest.mark.parametrize(
    "extra_args, field",
    [
        ({"dflash": {"max_draft_tokens": -1}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_draft_tokens": 2.5}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_draft_tokens": 2.0}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_draft_tokens": True}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_draft_tokens": "2"}}, "dflash.max_draft_tokens"),
        ({"dflash": '{"max_draft_tokens": [2]}'}, "dflash.max_draft_tokens"),
        ({"dflash.max_draft_tokens": -1}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_draft_tokens": 2}, "dflash.max_draft_tokens": 3}, "dflash.max_draft_tokens"),
        ({"dflash": {"workload": ""}}, "dflash.workload"),
        ({"dflash": {"workload": "x" * 65}}, "dflash.workload"),
        ({"dflash": {"workload": 7}}, "dflash.workload"),
        ({"dflash": {"max_drafts": 2}}, "dflash.max_drafts"),
        ({"dflash.": 2}, "dflash."),
        ({"dflash": "off"}, "dflash"),
        ({"dflash": "[1]"}, "dflash"),
        ({"dflash": 0}, "dflash"),
        ({"dflash": None}, "dflash"),
    ],
)
def test_a_bad_request_option_is_named_with_what_was_given(extra_args, field) -> None:
    with pytest.raises(RequestOptionError) as error:
        request_options(extra_args)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}")
    assert repr(error.value.value) in str(error.value)


def test_the_message_of_a_bad_request_option() -> None:
    with pytest.raises(ValueError) as error:
        request_options({"dflash": {"max_draft_tokens": -1}})
    assert str(error.value) == (
        "dflash.max_draft_tokens: Input should be greater than or equal to 0 (given: -1). "
        "Options of a request: max_draft_tokens, workload."
    )


@pytest.mark.parametrize("window", [0, -1, "wide", 1.5])
def test_a_draft_window_is_a_number_of_tokens(window) -> None:
    with pytest.raises(ValueError, match="draft_window"):
        server_options({"dflash": {"draft_window": window}})


@pytest.mark.parametrize(
    "given",
    ["[" * 100_000, '{"a":' * 50_000, "x" * 10_000, {"y" * 10_000: 1}, {"workload": "z" * 10_000}, {"\ud800": 2}],
    ids=["deep list", "deep object", "long text", "long name", "long value", "no text"],
)
def test_what_is_refused_is_shown_in_short(given) -> None:
    with pytest.raises(RequestOptionError) as refused:
        request_options({"dflash": given})
    assert len(str(refused.value)) < 800 and refused.value.field.startswith("dflash")
