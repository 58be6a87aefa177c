# SPDX-License-Identifier: Apache-2.0
"""What stands in a text of Prometheus' exposition format."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """Samples by name, each with its labels."""

    samples: dict[str, list[tuple[dict[str, str], float]]]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(samples)

    def sum(self, name: str, **labels: str) -> float:
        """Sum of all samples with these labels; 0 where there is none."""
        return sum(v for at, v in self.samples.get(name, ()) if labels.items() <= at.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of one label, samples of 0 left out."""
        sums: dict[str, float] = {}
        for at, value in self.samples.get(name, ()):
            if labels.items() <= at.items() and value:
                sums[at[label]] = sums.get(at[label], 0.0) + value
        return sums

    def histogram(self, name: str, **labels: str) -> dict[float, float]:
        """Observations by the upper bound of their bucket, empty buckets left out."""
        upto = self.by(f"{name}_bucket", "le", **labels)
        inside, before = {}, 0.0
        for bound in sorted(map(float, upto)):
            # Bounds are written as the client writes floats.
            here = sum(count for text, count in upto.items() if float(text) == bound)
            if here > before:
                inside[bound] = here - before
            before = here
        return inside
