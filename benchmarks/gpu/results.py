"""Rows of the table, and their shares of the peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.counts import Work

HEADER = "| quantity | ms | floor ms | tok/s | GB/s | of peak | TFLOP/s | of peak | |"
RULE = "|---|---:|---:|---:|---:|---:|---:|---:|---|"


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates measured in the same run, by a copy and a product."""

    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity.

    Attributes:
        name: what was measured.
        seconds: time of a step, or of the whole load; None if it failed.
        tokens: computed or generated in that time; 0 if none.
        work: bytes and operations in that time; None if they are not defined.
        note: free text, or the reason of a failure.
    """

    name: str
    seconds: float | None = None
    tokens: int = 0
    work: Work | None = None
    note: str = ""

    def as_json(self, peaks: Peaks | None) -> dict[str, Any]:
        """Return all figures in SI units."""
        found: dict[str, Any] = {"name": self.name, "seconds": self.seconds, "note": self.note}
        if self.seconds and self.tokens:
            found |= {"tokens": self.tokens, "tokens_per_second": self.tokens / self.seconds}
        if self.seconds and self.work is not None:
            found |= {
                "bytes": self.work.num_bytes,
                "operations": self.work.operations,
                "bytes_per_second": self.work.num_bytes / self.seconds,
                "operations_per_second": self.work.operations / self.seconds,
            }
            if peaks is not None:
                found |= {
                    "share_of_peak_bytes": found["bytes_per_second"] / peaks.bytes_per_second,
                    "share_of_peak_operations": found["operations_per_second"] / peaks.operations_per_second,
                    "floor_seconds": self.work.floor_seconds(peaks.bytes_per_second, peaks.operations_per_second),
                }
        return found

    def markdown(self, peaks: Peaks | None) -> str:
        """Return the row of the table."""
        found = self.as_json(peaks)

        def cell(key: str, form: str, factor: float = 1.0) -> str:
            return format(found[key] * factor, form) if found.get(key) is not None else ""

        cells = [
            self.name,
            cell("seconds", ".3f", 1e3),
            cell("floor_seconds", ".3f", 1e3),
            cell("tokens_per_second", ",.0f"),
            cell("bytes_per_second", ",.1f", 1e-9),
            cell("share_of_peak_bytes", ".0%"),
            cell("operations_per_second", ",.1f", 1e-12),
            cell("share_of_peak_operations", ".0%"),
            self.note,
        ]
        return f"| {' | '.join(cells)} |"
