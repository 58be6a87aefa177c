# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash plan`: the article's figures, the sources of its times, and the cost model it shares."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_dflash.cli import main
from vllm_dflash.plan.inputs import conditional
from vllm_dflash.spec_decode.cost import as_cycle_cost, expected_tokens

TABLE = {
    "target": {"rows": {"1": 0.018, "8": 0.020, "64": 0.031, "256": 0.090}, "context_token": 4e-7},
    "draft": {"rows": {"8": 0.003, "64": 0.005, "512": 0.02}},
    "block": 8,
    "step": 0.002,
    "speculation": 0.001,
    "acceptance": [0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4],
}
METRICS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 40.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 40.0
"""
STAGES = {"target": 0.018, "verify": 0.002, "inject": 0.0005, "draft": 0.002, "select": 0.0005}
TIMES = "".join(
    f"# TYPE vllm_dflash:{name}_seconds histogram\n"
    f'vllm_dflash:{name}_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} 10.0\n'
    f'vllm_dflash:{name}_seconds_sum{{engine="0",model_name="m"}} {10 * seconds}\n'
    f'vllm_dflash:{name}_seconds_count{{engine="0",model_name="m"}} 10.0\n'
    for name, seconds in STAGES.items()
)


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *map(str, arguments)])
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1].removeprefix("vllm-dflash plan: error: ")


@pytest.mark.parametrize(("accepted", "ms"), [(6, 3.8), (2, 11.5)])
def test_the_example_of_the_article(capsys: pytest.CaptureFixture[str], accepted: int, ms: float) -> None:
    figures = planned(capsys, "--draft-ms", 3, "--verify-ms", 20, "--accepted", accepted)
    assert figures["ms_per_token"] == pytest.approx(ms, abs=0.05)
    assert figures["speedup"] == pytest.approx(20 / (23 / accepted))
    assert figures["break_even_length"] == pytest.approx(23 / 20)


def test_the_text_says_it_and_that_one_point_is_no_plan_for_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--draft-ms", "3", "--verify-ms", "20", "--accepted", "6"]) == 0
    text = capsys.readouterr().out
    assert "with speculation     3.83 ms a token, 5.22 times plain decoding" in text
    assert "These times are one point" in text


def test_best_k_is_the_one_of_least_time_a_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(TABLE | {"target": {"rows": {"1": 0.02, "32": 0.021, "256": 0.2}}}))
    cost = as_cycle_cost(json.loads((tmp_path / "table.json").read_text()))
    figures = planned(capsys, "--cost-table", tmp_path / "table.json", "--concurrency", "1,8,32,64", "--context", "100")
    chosen = {row["concurrency"]: row["drafts"] for row in figures["best"]}
    for requests, drafts in chosen.items():
        times = [
            cost.seconds(k, requests, 100) / expected_tokens(TABLE["acceptance"], k)  # type: ignore[arg-type]
            for k in range(8)
        ]
        assert drafts == times.index(min(times))
    assert chosen[1] > chosen[32] >= 0


class Page(BaseHTTPRequestHandler):
    text = ""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(Page.text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_running_servers_means_are_the_times(capsys: pytest.CaptureFixture[str], url: str) -> None:
    Page.text = METRICS + TIMES
    figures = planned(capsys, "--metrics", url)
    assert figures["acceptance"] == [0.8, 0.5]
    assert figures["acceptance_length"] == pytest.approx(1 + 0.8 + 0.4)
    assert figures["draft_ms"] == pytest.approx(3.0)
    assert figures["cycle_ms"] == pytest.approx(23.0)


def test_a_server_without_times_or_speculation_is_told_so(capsys: pytest.CaptureFixture[str], url: str) -> None:
    Page.text = METRICS
    assert refused(capsys, "--metrics", url) == (
        f"{url} has acceptance but no vllm_dflash:draft_seconds and target_seconds. Give --draft-ms and --verify-ms."
    )
    Page.text = TIMES
    assert "shows no speculation yet" in refused(capsys, "--metrics", url)
    gone = "http://127.0.0.1:9"
    assert refused(capsys, "--metrics", gone).startswith(f"{gone}/metrics cannot be read: ")


def cell(group: str, concurrency: int, tpot: float, **more: Any) -> dict[str, Any]:
    point = {"workload": "code", "context": "short", "output": 64, "temperature": 0.0, "concurrency": concurrency}
    return {"group": group, **point, "tpot_p50_ms": {"median": tpot}, **more}


def test_a_bench_result_is_taken_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Plain 20 ms a step, a cycle 3 x 10 = 30 ms at one request, of which 4 ms draft."""
    spec = {
        "acceptance_by_position": [0.9, 0.7, 0.4],
        "acceptance_length": {"median": 3.0},
        "draft_ms": {"median": 4.0},
    }
    summary = [
        cell("plain", 1, 20.0),
        cell("plain", 8, 22.0),
        cell("dflash2", 1, 10.0, **spec),
        cell("dflash2", 8, 14.0, **spec),
    ]
    (tmp_path / "result.json").write_text(json.dumps({"summary": summary}))
    figures = planned(capsys, "--bench", tmp_path / "result.json", "--concurrency", "1,8", "--context", "100")
    assert figures["drafts"] == 3
    assert figures["acceptance_length"] == pytest.approx(3.0)
    assert figures["cycle_ms"] == pytest.approx(30.0)
    assert figures["plain_ms_per_token"] == pytest.approx(20.0)
    assert refused(capsys, "--bench", tmp_path / "result.json", "--group", "eagle3") == (
        f"{tmp_path / 'result.json'} has no group eagle3; it has dflash2."
    )


def test_rates_by_position_become_conditional() -> None:
    assert conditional([0.8, 0.4, 0.4, 0.0, 0.0]) == pytest.approx((0.8, 0.5, 1.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give --draft-ms and --verify-ms, or one of --bench, --metrics and --cost-table."),
        (["--draft-ms", "3"], "Both times are needed, --draft-ms and --verify-ms."),
        (["--draft-ms", "3", "--verify-ms", "20"], "Give --accepted, or --acceptance by position."),
        (
            ["--draft-ms", "fast", "--verify-ms", "20", "--accepted", "2"],
            "--draft-ms is 'fast'; give milliseconds, or ROWS:MS,ROWS:MS such as 1:18,64:31.",
        ),
        (
            ["--draft-ms", "3", "--verify-ms", "20", "--acceptance", "1.2"],
            "--acceptance is '1.2'; chances are from 0 to 1.",
        ),
        (
            ["--draft-ms", "3", "--verify-ms", "20", "--accepted", "9", "--drafts", "4"],
            "With 4 drafts the acceptance length is 1 to 5, it cannot be 9.0.",
        ),
        (["--bench", "nowhere.json"], "nowhere.json cannot be read: No such file or directory."),
    ],
)
def test_what_is_missing_or_wrong_is_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert refused(capsys, *arguments) == sentence


def test_the_page_has_its_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(TABLE))
    file = tmp_path / "plan.html"
    planned(capsys, "--cost-table", tmp_path / "table.json", "--html", file)
    text = file.read_text()
    assert text.count("<figure>") == 3
    assert text.count("<polyline") == 2 + 1 + 2
