"""First cause of NaN and infinity in one dump: the call that turned finite inputs into an output
that is not finite, over all ranks. Reads the tensors of one iteration.

The search is that of a comparison (`rank_origin`, `job_origin`), with one dump in the place of
two, so what a rank received in a collective is no cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from rankdump._analysis.compare.origin_search import ComparedDumps, find_origins
from rankdump._analysis.compare.pair_comparison import has_nonfinite_statistics
from rankdump._analysis.compare.programs import read_programs
from rankdump._analysis.compare.report import (
    ComparisonRow,
    DivergenceOrigin,
    DumpedProgram,
    DumpedTensor,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.tensor_loader import load
from rankdump._analysis.reader.tensor_statistics import statistics
from rankdump.errors import CorruptedError, UnsupportedError

_KnownDigests: TypeAlias = "dict[str, bool]"
"""Whether the elements of a digest are finite."""


def find_first_cause(dump: Dump, problems: list[str]) -> DivergenceOrigin | None:
    """Return where NaN or infinity starts in a dump; None when every tensor is known as finite.

    `dump` is best restricted to the first iteration with such a tensor, because all of its tensors
    are read. `problems` gets a sentence for damaged tables, which are ignored.
    """
    known: _KnownDigests = {}
    rows = [
        row
        for program in read_programs(dump, problems)
        for row in _yield_program_rows(program, known)
    ]
    origins, _ = find_origins(rows, ComparedDumps(dump, dump))
    return next((each for each in origins if each.kind == "nonfinite"), None)


def _yield_program_rows(program: DumpedProgram, known: _KnownDigests) -> Iterator[ComparisonRow]:
    for call in program.calls:
        for tensor in call.tensors:
            yield ComparisonRow(
                program.rank,
                program.iteration,
                call.position,
                "exact",
                call.op_type,
                call.op_name,
                "",
                call.backward,
                TensorPair(tensor, None),
                PairOutcome(
                    TensorVerdict.UNKNOWN, nonfinite_a=_has_nonfinite_elements(tensor, known)
                ),
            )


def _has_nonfinite_elements(tensor: DumpedTensor, known: _KnownDigests) -> bool | None:
    """Return whether a tensor has NaN or infinity; None when neither row nor file shows it."""
    tabled = has_nonfinite_statistics(tensor)
    if tabled is not None or tensor.entry is None:
        return tabled
    if tensor.digest in known:
        return not known[tensor.digest]
    try:
        computed = statistics(load(tensor.entry))
    except (CorruptedError, UnsupportedError):
        return None
    finite = computed.nans + computed.infinities == 0
    if tensor.digest:
        known[tensor.digest] = finite
    return not finite
