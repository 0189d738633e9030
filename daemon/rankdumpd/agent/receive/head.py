"""Whether a record's head agrees with itself and with its session. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import RecordHead

# Numbers from the wire end in signed 64-bit columns.
LIMIT = 1 << 63
MAX_FIGURES = 64
MAX_FIGURE_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class FigureRules:
    """What a session's plan says of figures that come in the place of elements."""

    due: int
    """How many there are."""
    elements: bool
    """Records bring their elements."""
    degrades: bool
    """A record for which there was no room may bring figures all the same."""


def check_head(sequence: int, head: RecordHead, first_bytes: int, rules: FigureRules) -> None:
    """Raise ProtocolError with the number at fault.

    Elements in the place of figures are no fault here: a tensor may have none, and one of them
    must not cost the session. `admit` drops it by reason.
    """
    if max(head.key.iteration, head.key.timestamp_us, head.byte_count, *head.shape) >= LIMIT:
        raise ProtocolError(f"record {sequence} with a number over {LIMIT - 1}")
    if first_bytes > head.data_bytes:
        raise ProtocolError(
            f"record {sequence} brings {first_bytes} bytes, declares {head.data_bytes}"
        )
    kind = ELEMENT_TYPES.get(head.dtype)
    if kind and head.byte_count != prod(head.shape) * kind.item_bytes:
        raise ProtocolError(
            f"record {sequence} declares {head.byte_count} bytes for {head.dtype} "
            f"of shape {list(head.shape)}"
        )
    if head.degraded and (head.figures is None or not rules.degrades):
        raise ProtocolError(f"record {sequence} is degraded: the plan's on_full allows none such")
    if head.figures is not None:
        if rules.elements and not head.degraded:
            raise ProtocolError(f"record {sequence} brings figures: the plan keeps elements")
        _check_figures(sequence, head.figures, rules.due)


def _check_figures(sequence: int, texts: tuple[str, ...], due: int) -> None:
    if len(texts) != due or due > MAX_FIGURES:
        raise ProtocolError(
            f"record {sequence} with {len(texts)} figures: the plan has {due}, "
            f"at most {MAX_FIGURES} are taken"
        )
    for text in texts:
        # They become fields of a table: nothing in one may end it.
        if len(text) > MAX_FIGURE_CHARACTERS or not text.isprintable() or set(text) & set(',"'):
            raise ProtocolError(
                f"record {sequence} with figure {text[:MAX_FIGURE_CHARACTERS]!r}: printable, no "
                f"comma or quote, at most {MAX_FIGURE_CHARACTERS} characters"
            )
