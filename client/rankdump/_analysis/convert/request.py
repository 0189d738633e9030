"""Values of a conversion: the request, the job of each file and its outcome. Pure values, which are
passed between processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """Parameters of a conversion."""

    target: str = ""
    """Format to convert to; empty to keep the format of the device."""
    kind: str = "npy"
    """`npy`, or `bin` for the elements alone."""
    shape: tuple[int, ...] = ()
    """Replaces the original shape of the header."""
    side: str = ""
    """`input` or `output`, to convert only the tensor `index` of this side."""
    index: int = 0


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """One file, and its output folder."""

    path: Path
    folder: Path
    bytes_stored: int = 0


@dataclass(frozen=True, slots=True)
class ConversionFailure:
    """A problem with a file: a failure, or a warning."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ShortenedName:
    """An output name that was too long, and the name on disk."""

    folder: Path
    name: str
    full_name: str


@dataclass(slots=True)
class ConversionOutcome:
    """Outcome of one file."""

    path: Path
    tensors: int = 0
    bytes_written: int = 0
    empty: bool = False
    failures: list[ConversionFailure] = field(default_factory=list[ConversionFailure])
    warnings: list[ConversionFailure] = field(default_factory=list[ConversionFailure])
    shortened_names: list[ShortenedName] = field(default_factory=list[ShortenedName])

    def add_failure(self, reason: str) -> None:
        """Add a failure of this file."""
        self.failures.append(ConversionFailure(self.path, reason))


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """Outcomes of all files."""

    outcomes: tuple[ConversionOutcome, ...]

    @property
    def tensors(self) -> int:
        """Number of tensors, buffers and workspaces written."""
        return sum(outcome.tensors for outcome in self.outcomes)

    @property
    def bytes_written(self) -> int:
        """Bytes of all outputs."""
        return sum(outcome.bytes_written for outcome in self.outcomes)

    @property
    def empty(self) -> list[Path]:
        """Files without content."""
        return sorted(outcome.path for outcome in self.outcomes if outcome.empty)

    @property
    def failures(self) -> list[ConversionFailure]:
        """Failures, by path."""
        return _sort_failures(found for outcome in self.outcomes for found in outcome.failures)

    @property
    def failed(self) -> list[Path]:
        """Files that were not converted, or not all of them."""
        return sorted({failure.path for failure in self.failures})

    @property
    def warnings(self) -> list[ConversionFailure]:
        """Warnings about tensors that were converted, by path."""
        return _sort_failures(found for outcome in self.outcomes for found in outcome.warnings)


def _sort_failures(found: Iterable[ConversionFailure]) -> list[ConversionFailure]:
    return sorted(found, key=lambda each: (each.path, each.reason))
