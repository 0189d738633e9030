"""What a page is: how its parameters are read, what it shows, and the template that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rankdump._web.dump_source import DumpSource
from rankdump._web.page_parameters import PageParameters
from rankdump.errors import PermanentError

_Request = TypeVar("_Request")


class AbsentPageError(PermanentError):
    """What an address names is not in the tree."""


@dataclass(frozen=True, slots=True)
class PageKind(Generic[_Request]):
    """One page: HTML by its template, and JSON, from the value that one function returns."""

    path: str
    template: str
    title: str
    parse: Callable[[PageParameters], _Request]
    """Reads the parameters; ParameterError for one that is not allowed."""
    build: Callable[[DumpSource, _Request], Any]
    """Returns what the page shows, a frozen dataclass; raises errors of rankdump."""
    fragment: str = ""
    """Template of the part that htmx asks for."""
    has_attempts: bool = False
    """Whether one job or attempt of the tree can be chosen."""

    @property
    def json_path(self) -> str:
        """Path of the JSON twin."""
        return f"{self.path}.json" if self.path != "/" else "/overview.json"
