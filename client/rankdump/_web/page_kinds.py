"""Definition of a page: how its parameters are read, what it shows, its template, and its values as
JSON; and the tree that it shows, with the chosen job or attempt. This choice is part of all
addresses that the page links to.

Nothing in an address is guessed: a parameter that the page does not have, a parameter that occurs
twice, and a value that is not allowed are errors with one line.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from starlette.datastructures import QueryParams
from starlette.requests import Request

from rankdump._web.dump_source import EVERYTHING, DumpSource, JobAttempt
from rankdump.errors import PermanentError

_Request = TypeVar("_Request")
MAX_TEXT = 4096
"""Largest number of characters of a text, since names of operators may be long."""
MAX_NUMBER = (1 << 63) - 1
_MAX_SHOWN = 60
_MAX_DIGITS = 30


class LineExcerpt(NamedTuple):
    """The first ones of some sentences, and how many there are."""

    shown: tuple[str, ...]
    total: int


class PageSlice(NamedTuple):
    """The part of a list of sorted numbers that one page shows."""

    shown: Sequence[int]
    previous: int | None
    """First number of the previous page; None if there is none."""
    next: int | None


def slice_page(numbers: Sequence[int], first: int, most: int) -> PageSlice:
    """Return at most `most` numbers from `first` on, and where the neighbouring pages begin."""
    begin = bisect_left(numbers, first)
    end = begin + most
    return PageSlice(
        numbers[begin:end],
        numbers[max(0, begin - most)] if begin else None,
        numbers[end] if end < len(numbers) else None,
    )


class AbsentPageError(PermanentError):
    """The tree does not have what an address names."""


class ParameterError(PermanentError):
    """Error about a parameter of a page, with its name, its value, and what is allowed."""

    def __init__(self, name: str, value: str, allowed: str) -> None:
        shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
        super().__init__(f"parameter {name}: {shown!r} is not allowed; allowed: {allowed}")


class PageParameters:
    """Reads the parameters of one request; `finish` rejects parameters that were not read."""

    def __init__(self, query: QueryParams) -> None:
        self._values: dict[str, str] = {}
        self._known: list[str] = []
        for name, value in query.multi_items():
            if name in self._values:
                raise ParameterError(name[:_MAX_SHOWN], value, "one value")
            self._values[name] = value

    def read_number(self, name: str, *, high: int = MAX_NUMBER) -> int | None:
        """Return a whole number of 0 or more; None if the parameter is absent or empty."""
        text = self._take(name)
        if not text:
            return None
        is_number = text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20
        if not is_number or not 0 <= int(text) <= high:
            span = "of at least 0" if high == MAX_NUMBER else f"from 0 to {high}"
            raise ParameterError(name, text, f"a whole number {span}")
        return int(text)

    def read_amount(self, name: str) -> float | None:
        """Return a finite number of 0 or more; None if the parameter is absent or empty."""
        text = self._take(name)
        if not text:
            return None
        try:
            number = float(text) if text.isascii() and len(text) <= _MAX_DIGITS else -1.0
        except ValueError:
            number = -1.0
        if not 0 <= number < math.inf:
            raise ParameterError(name, text, "a number of 0 or more, such as 1e-4")
        return number

    def read_choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """Return one of the allowed words; the default if the parameter is absent or empty."""
        text = self._take(name)
        if not text:
            return default
        if text not in allowed:
            raise ParameterError(name, text, ", ".join(filter(None, allowed)))
        return text

    def read_text(self, name: str, *, longest: int = MAX_TEXT) -> str:
        """Return a text; empty if the parameter is absent."""
        text = self._take(name)
        if len(text) > longest:
            raise ParameterError(name, text, f"at most {longest:,} characters")
        if "\0" in text:
            raise ParameterError(name, text, "characters other than NUL")
        return text

    def read_flag(self, name: str) -> bool:
        """Read a flag: True if it is set, False if the parameter is absent."""
        return self.read_choice(name, ("1", "0"), "0") == "1"

    def finish(self) -> None:
        """Raise a ParameterError for a parameter that the page does not have."""
        for name, value in self._values.items():
            if name not in self._known:
                known = ", ".join(sorted(self._known)) or "none"
                raise ParameterError(name[:_MAX_SHOWN], value, f"no such parameter; known: {known}")

    def _take(self, name: str) -> str:
        self._known.append(name)
        return self._values.get(name, "")


@dataclass(frozen=True, slots=True)
class PageKind(Generic[_Request]):
    """One page, as HTML through its template and as JSON; one function returns the
    value for both.
    """

    path: str
    template: str
    title: str
    parse: Callable[[PageParameters], _Request]
    """Reads the parameters; ParameterError for a value that is not allowed."""
    build: Callable[[DumpSource, _Request], Any]
    """Returns the content of the page, a frozen dataclass; raises errors of rankdump."""
    fragment: str = ""
    """Template for the part of the page that htmx requests."""
    has_attempts: bool = False
    """Whether a job or attempt of the tree can be chosen."""

    @property
    def json_path(self) -> str:
        """Path of the page as JSON."""
        return f"{self.path}.json" if self.path != "/" else "/overview.json"


def make_body(value: Any) -> Any:
    """Return a value that JSON can represent; NaN and infinities become texts."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return make_body(cast("Any", value).tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: make_body(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(cast("object", value), "_asdict"):
        return {name: make_body(each) for name, each in cast("Any", value)._asdict().items()}
    if isinstance(value, Mapping):
        named = cast("Mapping[object, Any]", value)
        return {str(name): make_body(each) for name, each in named.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [make_body(each) for each in cast("Sequence[Any]", value)]
    return str(value)


def wants_json(request: Request) -> bool:
    """Return whether JSON is requested, by the path or by the header `Accept`."""
    accepted = request.headers.get("accept", "")
    return request.scope["path"].endswith(".json") or accepted.startswith("application/json")


_MAX_JOB = 512
_MAX_ATTEMPT = (1 << 31) - 1
_MAX_LISTED = 100


class TreeChoice(int):
    """Number of a tree, as templates use it, with the job or attempt that is chosen."""

    part: JobAttempt = EVERYTHING
    has_attempts: bool = False
    """Whether the tree has several jobs or attempts."""

    def make_choice(self, part: JobAttempt, *, has_attempts: bool = False) -> TreeChoice:
        """Return the same tree with another job or attempt."""
        made = TreeChoice(self)
        made.part, made.has_attempts = part, has_attempts
        return made

    def get_values(self) -> dict[str, object]:
        """Return the choice as parameters for an address."""
        named = {"tree": int(self) or None, "job": self.part.job, "attempt": self.part.attempt}
        return {name: value for name, value in named.items() if value not in (None, "")}


KEPT_PARAMETERS = ("search", "statistic", "side", "nonfinite", "collectives", "rank")
"""Parameters that a link to another job or attempt keeps, because their values need not exist
there.
"""


class PartLink(NamedTuple):
    """A job or attempt that a page can show."""

    label: str
    choice: TreeChoice
    is_chosen: bool


def parse_choice(
    parameters: PageParameters, sources: Sequence[DumpSource]
) -> tuple[TreeChoice, DumpSource]:
    """Return the choice that an address contains, and that part of the tree.

    AbsentPageError for a job or attempt that the tree does not have.
    """
    number = parameters.read_number("tree", high=max(0, len(sources) - 1)) or 0
    job = parameters.read_text("job", longest=_MAX_JOB)
    part = JobAttempt(job, parameters.read_number("attempt", high=_MAX_ATTEMPT))
    source = sources[number]
    known = source.attempts
    if part != EVERYTHING and not any(_contains(part, each) for each in known):
        names = "; ".join(map(describe_part, known[:_MAX_LISTED])) or "none"
        raise AbsentPageError(f"the tree has no {describe_part(part)}; known: {names}")
    choice = TreeChoice(number).make_choice(part, has_attempts=len(known) > 1)
    return choice, source.select(part)


def list_choices(choice: TreeChoice, source: DumpSource) -> tuple[PartLink, ...]:
    """Return the jobs and attempts that can be chosen in a tree, with the whole tree first; none if
    there is only one.
    """
    if not choice.has_attempts:
        return ()
    parts = [EVERYTHING, *source.attempts[-_MAX_LISTED:]]
    return tuple(
        PartLink(describe_part(part), choice.make_choice(part), part == choice.part)
        for part in parts
    )


def describe_part(part: JobAttempt) -> str:
    """Return a job or attempt as text."""
    job = f"job {part.job}" if part.job else ""
    attempt = f"attempt {part.attempt}" if part.attempt is not None else ""
    return ", ".join(filter(None, (job, attempt))) or "all attempts"


def _contains(part: JobAttempt, known: JobAttempt) -> bool:
    return part.job in ("", known.job) and part.attempt in (None, known.attempt)
