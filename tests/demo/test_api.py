# SPDX-License-Identifier: Apache-2.0
"""The demo's reading of streams and counters, against pages in the form that vLLM 0.32 sends them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from examples.demo.api import Speculation, read_speculation, stream_answer

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 350.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 75.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
"""
EVENTS = (
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "two "}}]},
    {"choices": [{"delta": {"content": "words"}}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
)


class Pages(BaseHTTPRequestHandler):
    asked: dict[str, object]

    def do_GET(self) -> None:
        self.answer(METRICS if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        Pages.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Pages.asked["model"] == "unknown":
            self.send_error(404)
            return
        self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n")

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_counters_are_summed_over_engines_and_by_exact_name(url: str) -> None:
    assert read_speculation(url) == Speculation(drafts=50, proposed=350, accepted=75)


def test_acceptance_length_counts_the_verifiers_token() -> None:
    assert Speculation(drafts=50, proposed=350, accepted=75).acceptance_length() == 2.5
    assert Speculation().acceptance_length() == 1.0


def test_counters_since_an_earlier_reading() -> None:
    assert Speculation(50, 350, 75).since(Speculation(10, 70, 5)) == Speculation(40, 280, 70)


def test_an_answer_arrives_piece_by_piece(url: str) -> None:
    pieces: list[str] = []
    answer = stream_answer(url, "m", "a prompt", 7, pieces.append)
    assert [piece for piece in pieces if piece] == ["two ", "words"]
    assert (answer.text, answer.tokens) == ("two words", 3)
    assert answer.seconds > 0
    assert Pages.asked["max_tokens"] == 7
    assert Pages.asked["temperature"] == 0


def test_a_refusal_is_an_error(url: str) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        stream_answer(url, "unknown", "a prompt", 7, lambda piece: None)
