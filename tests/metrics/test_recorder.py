# SPDX-License-Identifier: Apache-2.0
"""From outcomes and timings to the delta of a step, and from deltas to what Prometheus reads."""

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY, generate_latest

from tests.metrics.scrape import Scrape
from vllm_dflash.metrics.exporter import Exporter, unregister
from vllm_dflash.metrics.recorder import STATE_EVERY, Recorder
from vllm_dflash.metrics.workloads import LONGEST, Workloads
from vllm_dflash.spec_decode import StepOutcome, Timing
from vllm_dflash.spec_decode.outcome import FAULT_KINDS, SKIP_REASONS, Tally

K = 3
FACTS = {"info": {"version": "1", "runner": "v1"}, "weights_bytes": 10, "kv_bytes": 20, "q_bytes": 30}


def recorder(facts=None) -> Recorder:
    return Recorder(Tally(), {"a": "chat", "b": "chat", "c": "code"}.__getitem__, facts)


@pytest.fixture
def exporter():
    yield Exporter("model", K, [0])
    unregister()


def scrape() -> Scrape:
    return Scrape.parse(generate_latest(REGISTRY).decode())


def test_a_delta_holds_each_thing_once() -> None:
    r = recorder()
    r.on_outcome(StepOutcome(["a", "b", "c"], [3, 3, 2], [1, 1, 0], {"prompt": 2}))
    r.on_outcome(StepOutcome(["c"], [0], [0], {"prompt": 1, "range": 1}))
    r.tally.fault("exception")
    r.tally.restored_context += 12
    r.on_timings([Timing(stage, s, 8, 3, 0, 1) for stage, s in (("target", 0.5), ("inject", 0.25), ("inject", 0.5))])
    delta = r.take()
    assert delta["verified"] == {"chat": [[3, 1, 2]], "code": [[2, 0, 1]]}
    assert delta["undrafted"] == 1
    assert delta["seconds"] == [["target", 0.5], ["inject", 0.75]]
    assert delta["skipped"] == {"prompt": 3, "range": 1}
    assert delta["faults"] == {"exception": 1}
    assert delta["restored"] == 12
    assert delta["enabled"] == 1
    assert r.take() == {}


def test_a_delta_survives_both_ways_it_travels() -> None:
    r = recorder(FACTS)
    r.on_outcome(StepOutcome(["a"], [3], [2], {"range": 1}))
    delta = r.take()
    assert pickle.loads(pickle.dumps(delta)) == delta
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta)) == delta


def test_state_comes_again_now_and_then_and_when_it_changes() -> None:
    r = recorder(FACTS)
    takes = [r.take() for _ in range(STATE_EVERY + 1)]
    assert [i for i, delta in enumerate(takes) if delta.get("facts") == FACTS] == [0, STATE_EVERY]
    r.tally.enabled = False
    assert r.take() == {"enabled": 0}


def test_what_is_exported_is_what_was_recorded(exporter: Exporter) -> None:
    r = recorder(FACTS)
    for _ in range(5):
        r.on_outcome(StepOutcome(["a", "b", "c"], [3, 1, 0], [2, 0, 0], {"request": 1}))
        r.tally.fault("non_finite")
        r.tally.restored_context += 7
        r.on_timings([Timing("draft", 0.02, 8, 3, 0, r._takes)])
        exporter.add(r.take(), 0)
    exporter.add({"enabled": 0, "speedup": 1.5}, 0)
    got = scrape()
    engine = {"model_name": "model", "engine": "0"}
    length = "vllm_dflash:acceptance_length_tokens"
    assert got.histogram(length, workload="chat", **engine) == {3.0: 5, 1.0: 5}
    assert got.sum(f"{length}_sum", workload="chat") == 20 and got.sum(f"{length}_count", workload="chat") == 10
    assert got.histogram(length, workload="code") == {}
    assert got.by("vllm_dflash:draft_tokens_total", "position", workload="chat", **engine) == {"1": 10, "2": 5, "3": 5}
    assert got.by("vllm_dflash:accepted_tokens_total", "position", workload="chat", **engine) == {"1": 5, "2": 5}
    assert got.histogram("vllm_dflash:block_length_tokens", **engine) == {3.0: 5, 1.0: 5, 0.0: 5}
    assert got.histogram("vllm_dflash:draft_seconds", **engine) == {0.025: 5}
    assert got.sum("vllm_dflash:draft_seconds_sum") == pytest.approx(0.1)
    assert got.by("vllm_dflash:skipped_drafts_total", "reason", **engine) == {"request": 5}
    assert got.by("vllm_dflash:faults_total", "kind", **engine) == {"non_finite": 5}
    assert got.sum("vllm_dflash:restored_context_positions_total", **engine) == 35
    assert got.sum("vllm_dflash:speedup_ratio", **engine) == 1.5
    assert got.samples["vllm_dflash:speculation_enabled"] == [(engine, 0.0)]
    assert [got.sum(f"vllm_dflash:draft_{what}_bytes", **engine) for what in ("weights", "kv", "q")] == [10, 20, 30]
    ((labels, value),) = got.samples["vllm_dflash:info"]
    assert value == 1 and labels.items() >= {"version": "1", "runner": "v1", "drafter": ""}.items()


def test_counters_stand_at_zero_before_anything_happened(exporter: Exporter) -> None:
    got = scrape()
    assert {at["reason"] for at, _ in got.samples["vllm_dflash:skipped_drafts_total"]} == set(SKIP_REASONS)
    assert {at["kind"] for at, _ in got.samples["vllm_dflash:faults_total"]} == set(FAULT_KINDS)
    assert {at["position"] for at, _ in got.samples["vllm_dflash:accepted_tokens_total"]} == {"1", "2", "3"}
    assert all(value == 0 for name, all_of in got.samples.items() if name.startswith("vllm_dflash:") and
               not name.endswith("_created") for _, value in all_of)  # fmt: skip


def test_engines_keep_apart_and_a_later_one_is_new(exporter: Exporter) -> None:
    exporter.add({"verified": {"default": [[2, 2, 1]]}}, 0)
    exporter.add({"verified": {"default": [[2, 1, 1]]}}, 5)
    got = scrape()
    assert got.by("vllm_dflash:accepted_tokens_total", "engine") == {"0": 2, "5": 1}


def test_an_engine_that_starts_anew_leaves_one_line_of_what_runs(exporter: Exporter) -> None:
    for drafter in ("first", "second", "second", "first"):
        exporter.add({"facts": FACTS | {"info": FACTS["info"] | {"drafter": drafter}}}, 0)
        exporter.add({"facts": FACTS}, 1)
        ones = [(at["drafter"], value) for at, value in scrape().samples["vllm_dflash:info"] if at["engine"] == "0"]
        assert ones == [(drafter, 1)]


def test_a_second_exporter_takes_the_place_of_the_first(exporter: Exporter) -> None:
    exporter.add({"restored": 3}, 0)
    Exporter("other", K, [0])
    assert scrape().by("vllm_dflash:restored_context_positions_total", "model_name") == {}
    unregister()
    assert not any(name.startswith("vllm_dflash:") for name in scrape().samples)


def test_workload_labels_are_safe_and_few() -> None:
    workloads = Workloads(3)
    assert workloads.label(None) == workloads.label("") == "default"
    assert workloads.label('say "hi"\n{}') == "say__hi____"
    assert workloads.label("x" * 500) == "x" * LONGEST
    assert workloads.label("team-a/code:v1.2") == "team-a/code:v1.2"
    assert workloads.label("one more") == "other"
    assert workloads.label("x" * 500) == "x" * LONGEST
    assert {workloads.label(f"w{i}") for i in range(10_000)} == {"other"}
    assert len(workloads.known) == 3
    assert Workloads(0).label("chat") == "other"


def test_many_steps_leave_no_more_memory_than_few() -> None:
    def held(steps: int) -> int:
        r = Recorder(Tally(), lambda request_id: "default")
        for step in range(steps):
            r.on_outcome(StepOutcome([f"r{step}-{i}" for i in range(8)], [3] * 8, [step % 4] * 8, {}, step))
            r.on_timings([Timing(stage, 0.01, 32, 8, 0, step) for stage in ("target", "verify", "draft")])
            r.take()
        return len(pickle.dumps((r.speedup._steps, r.speedup.target, r._verified, r._seconds, r._skipped, r.tally)))

    assert held(2000) <= held(100) + 100


SEVERAL = """
    import os, sys
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess
    from vllm_dflash.metrics.exporter import Exporter
    exporter = Exporter("model", 3, [0, 1])
    for engine in (0, 1):
        exporter.add({"verified": {"chat": [[3, 1, 2]]}, "seconds": [["draft", 0.01]]}, engine)
    exporter.add({"speedup": float(sys.argv[1]), "enabled": 1}, 0)
    for drafter in ("before", "after"):
        exporter.add({"facts": {"info": {"drafter": drafter}}}, 0)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def test_several_front_ends_add_up_in_their_shared_folder(tmp_path: Path) -> None:
    """Processes one after the other: the first has ended, as a front end that was restarted has."""
    for ratio in ("2.0", "1.25"):
        text = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SEVERAL), ratio],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    got = Scrape.parse(text)
    assert got.by("vllm_dflash:accepted_tokens_total", "engine", workload="chat") == {"0": 4, "1": 4}
    assert got.histogram("vllm_dflash:acceptance_length_tokens", engine="1", workload="chat") == {2.0: 4}
    assert got.sum("vllm_dflash:draft_seconds_count", engine="0") == 2
    assert got.sum("vllm_dflash:speedup_ratio") == 1.25
    assert got.sum("vllm_dflash:speculation_enabled") == 1
    assert {at["drafter"]: value for at, value in got.samples["vllm_dflash:info"]} == {"before": 0, "after": 1}
