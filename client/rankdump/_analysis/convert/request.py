"""Values of a conversion: what is to be converted and how, and the outcome of each file. Pure
values; they travel between processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """Parameters of a conversion."""

    target: str = ""
    """Format to convert to; empty: tensors stay as they lay on the device."""
    kind: str = "npy"
    """`npy`, or `bin` for the elements alone."""
    shape: tuple[int, ...] = ()
    """Stands for the original shape of the header."""
    side: str = ""
    """`input` or `output`, when only the tensor `index` of this side is wanted."""
    index: int = 0


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """One file, and the folder for what comes of it."""

    path: Path
    folder: Path
    bytes_stored: int = 0


@dataclass(frozen=True, slots=True)
class ConversionFailure:
    """A file that was not converted, or not all of it."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ShortenedName:
    """A name that was too long for the folder, and the one that stands for it."""

    folder: Path
    name: str
    full_name: str


@dataclass(frozen=True, slots=True)
class ConversionOutcome:
    """Outcome of one file."""

    path: Path
    tensors: int = 0
    bytes_written: int = 0
    empty: bool = False
    failures: tuple[ConversionFailure, ...] = ()
    warnings: tuple[ConversionFailure, ...] = ()
    shortened_names: tuple[ShortenedName, ...] = ()


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """Outcomes of all files."""

    outcomes: tuple[ConversionOutcome, ...]

    @property
    def tensors(self) -> int:
        """Tensors, buffers and workspaces that were written."""
        return sum(outcome.tensors for outcome in self.outcomes)

    @property
    def bytes_written(self) -> int:
        """Bytes of all outputs."""
        return sum(outcome.bytes_written for outcome in self.outcomes)

    @property
    def empty(self) -> list[Path]:
        """Files that hold nothing."""
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
