# SPDX-License-Identifier: Apache-2.0
"""The metrics as Prometheus sees them, in the front end's own registry. Several front ends share one by its files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vllm_dflash.metrics.recorder import Delta
from vllm_dflash.metrics.workloads import DEFAULT
from vllm_dflash.spec_decode.outcome import FAULT_KINDS, SKIP_REASONS
from vllm_dflash.spec_decode.timing import STAGES

PREFIX = "vllm_dflash:"
INFO_LABELS = (
    "version",
    "vllm_version",
    "drafter",
    "architecture",
    "runner",
    "ops_backend",
    "attention_backend",
)
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STAGE_HELP = {
    "target": "Seconds of the target's forward over the rows to verify, logits included, a step.",
    "verify": "Seconds of the rejection of drafts, a step.",
    "inject": "Seconds of writing the draft's context KV, a step.",
    "draft": "Seconds of the drafter's forward, a step.",
    "select": "Seconds of choosing the candidates and the path through them, a step.",
}


class CountedHistogram(Histogram):
    """A histogram that takes one value many times at once."""

    def add(self, value: float, count: int) -> None:
        self._sum.inc(value * count)
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            if value <= bound:
                bucket.inc(count)
                break


class Exporter:
    """All metrics of one front end. Making it takes those of an exporter before it out of the registry.

    Args:
        model_name: the label of vLLM's own metrics.
        drafts: K, the longest block.
        engines: indices that are known beforehand; their counters stand at 0 from the start.
    """

    def __init__(self, model_name: str, drafts: int, engines: Iterable[int] = ()) -> None:
        unregister()
        self.model_name = model_name
        self.drafts = drafts
        labels = ["model_name", "engine"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(PREFIX + name, text, [*labels, *more])

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(PREFIX + name, text, [*labels, *more], multiprocess_mode="mostrecent")

        def histogram(name: str, text: str, buckets: Iterable[float], *more: str) -> CountedHistogram:
            return CountedHistogram(PREFIX + name, text, [*labels, *more], buckets=tuple(buckets))

        self.acceptance_length = histogram(
            "acceptance_length_tokens",
            "Tokens a verified block yielded, the target's own token counted (1 is no gain).",
            range(1, drafts + 2),
            "workload",
        )
        self.draft_tokens = counter("draft_tokens", "Drafts verified, by position.", "position", "workload")
        self.accepted_tokens = counter("accepted_tokens", "Drafts accepted, by position.", "position", "workload")
        self.block_length = histogram(
            "block_length_tokens",
            "Drafts verified a decoding request and step, 0 counted.",
            range(drafts + 1),
        )
        self.stages = {stage: histogram(f"{stage}_seconds", STAGE_HELP[stage], SECONDS) for stage in STAGES}
        self.skipped = counter("skipped_drafts", "Requests a step that got no draft, by reason.", "reason")
        self.faults = counter("faults", "Faults of the drafter, by kind.", "kind")
        self.restored = counter("restored_context_positions", "Positions whose draft context was computed anew.")
        self.speedup = gauge("speedup_ratio", "Estimate of tokens a second over those of plain decoding.")
        self.enabled = gauge("speculation_enabled", "1 while the drafter runs, 0 once faults switched it off.")
        self.bytes = {
            "weights_bytes": gauge("draft_weights_bytes", "Bytes of the draft's own weights on one rank."),
            "kv_bytes": gauge("draft_kv_bytes", "Bytes of KV cache that the draft's layers have on one rank."),
            "q_bytes": gauge("draft_q_bytes", "Bytes of drafts and their q between two steps of a full batch."),
        }
        self.info = gauge("info", "1, with what runs in the labels.", *INFO_LABELS)
        self._told: dict[tuple[str, str], tuple[str, ...]] = {}
        self._children: dict[tuple[Any, ...], Any] = {}
        for engine in engines:
            self._start_at_zero(str(engine))

    def _start_at_zero(self, engine: str) -> None:
        at = self.model_name, engine
        self.acceptance_length.labels(*at, DEFAULT)
        self.block_length.labels(*at)
        for position in range(1, self.drafts + 1):
            self.draft_tokens.labels(*at, str(position), DEFAULT)
            self.accepted_tokens.labels(*at, str(position), DEFAULT)
        for stage in STAGES:
            self.stages[stage].labels(*at)
        for reason in SKIP_REASONS:
            self.skipped.labels(*at, reason)
        for kind in FAULT_KINDS:
            self.faults.labels(*at, kind)
        self.restored.labels(*at)

    def add(self, delta: Delta, engine: int) -> None:
        """What one engine (by its data-parallel index) did since its last delta."""
        at = self.model_name, str(engine)
        for workload, pairs in delta.get("verified", {}).items():
            self._verified(at, workload, pairs)
        if "undrafted" in delta:
            self._child(self.block_length, *at).add(0, delta["undrafted"])
        for stage, seconds in delta.get("seconds", ()):
            self._child(self.stages[stage], *at).observe(seconds)
        for reason, count in delta.get("skipped", {}).items():
            self._child(self.skipped, *at, reason).inc(count)
        for kind, count in delta.get("faults", {}).items():
            self.faults.labels(*at, kind).inc(count)
        if "restored" in delta:
            self.restored.labels(*at).inc(delta["restored"])
        if "speedup" in delta:
            self._child(self.speedup, *at).set(delta["speedup"])
        if "enabled" in delta:
            self.enabled.labels(*at).set(delta["enabled"])
        facts: dict[str, Any] = delta.get("facts", {})
        for name, gauge in self.bytes.items():
            if name in facts:
                gauge.labels(*at).set(facts[name])
        if "info" in facts:
            self._tell(at, tuple(str(facts["info"].get(label, "")) for label in INFO_LABELS))

    def _tell(self, at: tuple[str, str], labels: tuple[str, ...]) -> None:
        """What runs now; an engine that starts anew may have another drafter, and the one before is gone."""
        before = self._told.get(at)
        if before == labels:
            return
        if before is not None:
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # files keep every label they were given
                self.info.labels(*at, *before).set(0)
            else:
                self.info.remove(*at, *before)
        self.info.labels(*at, *labels).set(1)
        self._told[at] = labels

    def _child(self, metric: Any, *labels: str) -> Any:
        """metric.labels(*labels), which costs as much as what is done with it, several times a step."""
        key = metric, *labels
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def _verified(self, at: tuple[str, str], workload: str, pairs: Iterable[tuple[int, int, int]]) -> None:
        drafted_at = [0] * (self.drafts + 1)
        accepted_at = [0] * (self.drafts + 1)
        lengths, block = self._child(self.acceptance_length, *at, workload), self._child(self.block_length, *at)
        for drafted, accepted, requests in pairs:
            block.add(drafted, requests)
            if drafted:
                lengths.add(accepted + 1, requests)
                drafted_at[drafted] += requests
                accepted_at[accepted] += requests
        for counters, ends in ((self.draft_tokens, drafted_at), (self.accepted_tokens, accepted_at)):
            reaching = 0
            for position in range(self.drafts, 0, -1):
                reaching += ends[position]
                if reaching:
                    self._child(counters, *at, str(position), workload).inc(reaching)


def unregister() -> None:
    """Takes this package's metrics out of the process's registry."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
