"""Templates of the pages. All values are escaped, and a name that is not defined is an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rankdump._core.units import format_bytes, format_count
from rankdump._web.dump_source import TensorRow
from rankdump._web.page_kinds import TreeChoice

_DIGITS = 6


@cache
def get_environment() -> Environment:
    """Return the environment for all templates, which compiles each of them once per process."""
    made = Environment(
        loader=PackageLoader("rankdump._web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: dict[str, Any] = {
        "number": format_number,
        "measure": format_measure,
        "bytes": format_bytes,
        "shape": format_shape,
        "element": format_element,
        "thousands": "{:,}".format,
        "counted": format_count,
    }
    made.filters.update(filters)
    functions: dict[str, Any] = {
        "address": make_address,
        "choice_inputs": make_choice_inputs,
        "tensor_values": get_tensor_values,
    }
    made.globals.update(functions)
    return made


def format_number(value: float | None) -> str:
    """Return a statistic as text with six digits; a dash for None."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    return f"{value:.{_DIGITS}g}".replace("-", "\N{MINUS SIGN}", 1 if value < 0 else 0)


def format_measure(value: float | None) -> str:
    """Return a measure of a difference as text; a dash if the measure has no meaning."""
    return format_number(None if value is None or math.isnan(value) else value)


def format_element(value: Any) -> str:
    """Return an element as text: a number with six digits; anything else unchanged."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return format_number(value) if is_number else str(value)


def format_shape(extents: Iterable[int]) -> str:
    """Return a shape as text; `scalar` for a shape without dimensions."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, extents)) or "scalar"


def make_address(path: str, tree: int, values: Mapping[str, Any] | None = None) -> str:
    """Return the address of a page, with the parameters that have a value and those of the tree
    choice.
    """
    kept = {
        name: int(value) if isinstance(value, bool) else value
        for name, value in (values or {}).items()
        if value is not None and value != "" and value is not False
    }
    kept |= {name: at for name, at in _get_choice(tree).items() if name not in kept}
    return f"{path}?{urlencode(kept)}" if kept else path


def _get_choice(tree: int) -> dict[str, Any]:
    """Return the parameters that all links of a page have in common."""
    return (tree if isinstance(tree, TreeChoice) else TreeChoice(tree)).get_values()


def make_choice_inputs(tree: int) -> Markup:
    """Return hidden inputs that make a form keep the tree choice."""
    line = Markup('<input type="hidden" name="{}" value="{}">')
    return Markup("").join(line.format(*each) for each in _get_choice(tree).items())


def get_tensor_values(row: TensorRow, tree: int) -> dict[str, Any]:
    """Return the parameters of the page that shows a row's tensor at its place."""
    names = ("name", "side", "slot", "rank", "iteration")
    has_attempts = isinstance(tree, TreeChoice) and tree.has_attempts
    own = ("job", "attempt") if has_attempts else ()
    return {name: getattr(row, name) for name in (*names, *own)}
