"""Whether a record's bytes and rows of figures agree with their session. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import FigureRows

MAX_FIGURES = 64
MAX_FIGURE_CHARACTERS = 64
_TOO_LONG = re.compile(rf"[^,]{{{MAX_FIGURE_CHARACTERS + 1}}}")


@dataclass(frozen=True, slots=True)
class FigureRules:
    """What a session's plan says of figures that come in the place of elements."""

    due: int
    """How many there are of each tensor."""
    elements: bool
    """Records bring their elements."""
    degrades: bool
    """A tensor for which there was no room may bring figures all the same."""


def check_head(sequence: int, head: RecordHead, first_bytes: int) -> None:
    """Raise ProtocolError where a record brings more than it declares.

    Elements in the place of figures are no fault here: a tensor may have none, and one of them
    must not cost the session. `admit` drops it by reason.
    """
    if first_bytes > head.byte_count:
        raise ProtocolError(
            f"record {sequence} brings {first_bytes} bytes, declares {head.byte_count}"
        )


def check_rows(sequence: int, rows: FigureRows, rules: FigureRules) -> None:
    """Raise ProtocolError where figures are not those of the plan, or could harm a table."""
    if rows.degraded and not rules.degrades:
        raise ProtocolError(f"frame {sequence} is degraded: the plan's on_full allows none such")
    if rules.elements and not rows.degraded:
        raise ProtocolError(f"frame {sequence} brings figures: the plan keeps elements")
    if rules.due > MAX_FIGURES:
        raise ProtocolError(
            f"frame {sequence}: the plan has {rules.due} figures, at most {MAX_FIGURES} are taken"
        )
    for text in rows.figures:
        count = text.count(",") + 1 if text else 0
        if count != rules.due:
            raise ProtocolError(f"frame {sequence} with {count} figures: the plan has {rules.due}")
    _check_texts(sequence, rows.figures)


def _check_texts(sequence: int, texts: Sequence[str]) -> None:
    # They become fields of a table: nothing in one may end it. All at once, because thousands
    # come with every step.
    joined = ",".join(texts)
    if joined.isprintable() and '"' not in joined and not _TOO_LONG.search(joined):
        return
    for text in joined.split(","):
        if len(text) > MAX_FIGURE_CHARACTERS or not text.isprintable() or '"' in text:
            raise ProtocolError(
                f"frame {sequence} with figure {text[:MAX_FIGURE_CHARACTERS]!r}: printable, no "
                f"quote, at most {MAX_FIGURE_CHARACTERS} characters"
            )
