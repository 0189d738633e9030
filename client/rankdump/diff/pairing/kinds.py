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

_SYNONYMS = {
    "dense": "linear",
    "addmm": "linear",
    "conv1d": "conv",
    "conv2d": "conv",
    "conv3d": "conv",
    "conv2dbackpropfilter": "convbackpropfilter",
    "depthwiseconv2dnative": "conv",
    "fusedbatchnorm": "batchnorm",
    "fusedbatchnormv3": "batchnorm",
    "batchnorm1d": "batchnorm",
    "batchnorm2d": "batchnorm",
    "batchnorm3d": "batchnorm",
    "batchnormalization": "batchnorm",
    "layernormalization": "layernorm",
    "maxpool1d": "maxpool",
    "maxpool2d": "maxpool",
    "avgpool1d": "avgpool",
    "avgpool2d": "avgpool",
    "meanpool": "avgpool",
    "adaptiveavgpool2d": "adaptiveavgpool",
    "sequentialcell": "sequential",
    "celllist": "modulelist",
    "embeddinglookup": "embedding",
    "gatherv2": "gather",
    "reducemean": "mean",
    "reducesum": "sum",
    "reducemax": "max",
    "reducemin": "min",
    "batchmatmul": "matmul",
    "bmm": "matmul",
    "mm": "matmul",
    "view": "reshape",
    "permute": "transpose",
    "cat": "concat",
    "concatv2": "concat",
    "mul": "multiply",
    "realdiv": "divide",
    "truediv": "divide",
    "div": "divide",
    "sub": "subtract",
    "cast": "to",
    "addv2": "add",
    "fastgelu": "gelu",
    "silu": "swish",
    "softmaxcrossentropywithlogits": "crossentropy",
    "crossentropyloss": "crossentropy",
    "nllloss": "nll",
}
"""Names of other frameworks, and of other releases, for one computation."""
_PREFIX = re.compile(rf"(?:{'|'.join(kind for kind in KINDS if kind != LAYER)}|Mint|Ops)_")
_NUMBER = re.compile(r"(?:-op[0-9]+(?:_[0-9]+)?|_[0-9]+)$")
_COMPONENT = re.compile(r"[^/.]+")


@lru_cache(maxsize=1 << 12)
def family_name(op_type: str) -> str:
    """Return what all frameworks call a type: `Dense`, `NN_Linear` and `Linear` are one."""
    plain = _PREFIX.sub("", op_type, count=1).lower().replace("_", "")
    return _SYNONYMS.get(plain, plain)


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
    api = call_of(call.op_name)
    return api is not None and api.kind != LAYER


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
