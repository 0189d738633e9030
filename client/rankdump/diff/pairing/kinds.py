"""What two calls have in common when their names differ: family, direction, shapes. Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TypeAlias

from rankdump.contract.layout.api_name import KINDS, LAYER, call_of
from rankdump.contract.selection import matched_name
from rankdump.diff.values import Call

Family: TypeAlias = "tuple[str, bool, bool]"
"""Type of the operator as all frameworks call it, whether backward, whether recomputed."""
Shapes: TypeAlias = "tuple[tuple[tuple[int, ...] | None, ...], ...]"

_ALIKE = {
    "abs": "absolute",
    "adaptiveavgpool": "adaptiveavgpool2d adaptiveavgpool1d adaptiveavgpool3d",
    "add": "addv2 radd iadd",
    "avgpool": "avgpool1d avgpool2d meanpool avgpool3d",
    "batchnorm": (
        "fusedbatchnorm fusedbatchnormv3 batchnorm1d batchnorm2d batchnorm3d batchnormalization"
    ),
    "binarycrossentropy": "bceloss",
    "binarycrossentropywithlogits": "bcewithlogitsloss",
    "clamp": "clipbyvalue clip",
    "concat": "cat concatv2",
    "conv": "conv1d conv2d conv3d depthwiseconv2dnative",
    "convbackpropfilter": "conv2dbackpropfilter",
    "convtranspose": (
        "convtranspose2d conv2dtranspose convtranspose1d "
        "conv1dtranspose conv3dtranspose convtranspose3d"
    ),
    "crossentropy": "softmaxcrossentropywithlogits crossentropyloss",
    "divide": "realdiv truediv div rtruediv itruediv",
    "embedding": "embeddinglookup",
    "eq": "equal",
    "expand": "broadcastto",
    "floordivide": "floordiv",
    "gather": "gatherv2 gatherelements gatherd",
    "ge": "greaterequal",
    "gelu": "fastgelu",
    "gt": "greater",
    "hardshrink": "hshrink",
    "hardsigmoid": "hsigmoid",
    "hardswish": "hswish",
    "interpolate": "upsample resizebilinear",
    "kldiv": "kldivloss",
    "layernorm": "layernormalization",
    "le": "lessequal",
    "linear": "dense addmm",
    "localresponsenorm": "lrn",
    "lt": "less",
    "matmul": "batchmatmul bmm mm rmatmul",
    "max": "reducemax",
    "maxpool": "maxpool1d maxpool2d maxpool3d",
    "mean": "reducemean",
    "min": "reducemin",
    "modulelist": "celllist",
    "multiply": "mul rmul imul",
    "ne": "notequal",
    "neg": "negative",
    "nll": "nllloss",
    "pow": "rpow",
    "prod": "reduceprod",
    "remainder": "floormod mod",
    "reshape": "view",
    "scaleddotproductattention": "flashattentionscore",
    "sequential": "sequentialcell",
    "subtract": "sub rsub isub",
    "sum": "reducesum",
    "swish": "silu",
    "to": "cast astype type float half bfloat16",
    "transpose": "permute swapaxes t",
    "unsqueeze": "expanddims",
    "where": "select",
}
"""Names of other frameworks, and of other releases, for one computation: by the one that stands for
all, as `family_name` spells them.

These decide which calls may be paired at all, so they go further than the table of troubleshooter
in `diff.flow.spelling`, which equates names in order to pair exactly what that tool pairs.
"""
SYNONYMS = {other: name for name, others in _ALIKE.items() for other in others.split()}
"""What stands for a name, by that name."""
_PREFIX = re.compile(rf"(?:{'|'.join(kind for kind in KINDS if kind != LAYER)}|Mint|Ops)_")
_NUMBER = re.compile(r"(?:-op[0-9]+(?:_[0-9]+)?|_[0-9]+)$")
_COMPONENT = re.compile(r"[^/.]+")


@lru_cache(maxsize=1 << 12)
def family_name(op_type: str) -> str:
    """Return what all frameworks call a type: `Dense`, `NN_Linear` and `Linear` are one."""
    plain = _PREFIX.sub("", op_type, count=1).lower().replace("_", "")
    return SYNONYMS.get(plain, plain)


def family(call: Call) -> Family:
    """Return what two calls must share to stand for each other without a name."""
    return family_name(call.op_type), call.backward, call.recomputed


def shapes(call: Call) -> Shapes:
    """Return the extents of all tensors, inputs and outputs."""
    return (
        tuple(extents(tensor.shape) for tensor in call.inputs),
        tuple(extents(tensor.shape) for tensor in call.outputs),
    )


def extents(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the extents of a shape in any order of axes, and without those of 1.

    So a tensor in NHWC is like the same one in NCHW. None for what only a file knows.
    """
    return None if shape is None else tuple(sorted(extent for extent in shape if extent != 1))


def numbered(call: Call) -> bool:
    """Return whether the name is a count of calls: an extra one shifts all that follow."""
    return call_of(call.op_name) is not None and not marks_layer(call.op_name)


def marks_layer(op_name: str) -> bool:
    """Return whether it is no call, but the mark that a module of that name was called."""
    api = call_of(op_name)
    return api is not None and api.kind == LAYER


def scope(op_name: str) -> tuple[str, ...]:
    """Return the path of an operator in its network, without types and numbers.

    >>> scope("Default/network-Net/layer1-Sequential/0-Linear/Linear-op0")
    ('layer1', '0')
    """
    if call_of(op_name) is not None:
        return ()
    whole = matched_name(op_name).removeprefix("Default/")
    parts = _COMPONENT.findall(whole.rpartition("/")[0] or _NUMBER.sub("", whole))
    names = [part.rpartition("-")[0] or part for part in parts]
    return tuple(names[1:] if names and names[0] == "network" else names)
