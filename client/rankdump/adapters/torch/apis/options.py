"""What is observed of calls of an API, beside what the plan of the session says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankdump.contract.layout.api_name import ApiCall


def everything(call: ApiCall) -> bool:
    """Select every call."""
    return True


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The parameters of `api_dump_init` and `api_dump_start` that concern what is observed."""

    retain_backward: bool = False
    """Gradients of what calls returned are observed as well."""
    filter_data: bool = True
    """Only floating-point tensors with a dimension and elements; no numbers of Python."""
    filter_stack: bool = True
    """Stacks have the frames of the user's files only."""
    layers_once: bool = False
    """Each module is marked only the first time that it is called."""
    scope: Callable[[ApiCall], bool] = everything
    """Whether a call is observed: asked once, for its forward; its backward follows."""
