"""Short names of operators and models for people, made from full scope names. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

_TOP_SCOPES = ("Default", "Gradients", "Recompute")
_MODEL_CLASS = re.compile(r"(?:^|/)network-([^/]+)")


def name_models(
    named: Iterable[tuple[int, str]], known: Mapping[int, str] | None = None
) -> dict[int, str]:
    """Return the names of models by graph, from pairs of graph and operator name; empty names if
    there is only one model.

    A model that is not in `known` gets the name of its class.

    >>> name_models([(0, "Default/network-G/0-Linear/Linear-op0"), (1, "Default/network-D/D-op0")])
    {0: 'G', 1: 'D'}
    """
    found: dict[int, str] = {}
    for graph, op_name in named:
        if not found.get(graph):
            of_class = _MODEL_CLASS.search(op_name)
            found[graph] = of_class[1] if of_class else ""
    if len(found) < 2:
        return {}
    if known:
        found = {graph: known.get(graph) or name for graph, name in found.items()}
    often = Counter(found.values())
    return {
        graph: name if often[name] == 1 else f"{name}[{graph}]"
        for graph, name in found.items()
        if name
    }


def format_scope_name(op_name: str, model: str = "") -> str:
    """Return a short scope name: the names of the modules, then the operator.

    The name of a model, if given, comes first, except if the operator is the call of a model of
    that class.

    >>> format_scope_name("Gradients/Default/network-Net/encoder-Encoder/0-Linear/Linear-op0")
    'Gradients/encoder.0/Linear-op0'
    """
    *scope, operator = op_name.split("/")
    marks = [part for part in scope if part in ("Gradients", "Recompute")]
    modules = [
        part for part in scope if part not in _TOP_SCOPES and not part.startswith("network-")
    ]
    # The call of a model itself has only the name of the class, which several models may have.
    is_in_model = any(part.startswith("network-") for part in scope)
    is_named = modules or (is_in_model and operator.rpartition("-op")[0] != model)
    path = ".".join([*([model] if model and is_named else []), *map(_module_name, modules)])
    return "/".join([*marks, *([path] if path else []), operator])


def _module_name(module: str) -> str:
    # The suffix is either the class of the module, which the operator repeats, or the number of a
    # group.
    name, _, kind = module.rpartition("-")
    return name if name and not kind.isdigit() else module
