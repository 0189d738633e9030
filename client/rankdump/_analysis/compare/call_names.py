"""Names of calls: the operator family that all frameworks share, the path of the module, and the
user's mapping from names of one dump to names of the other. The mapping file is the only file that
is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path
from typing import TypeAlias, cast

from rankdump._analysis.compare.report import DumpedCall
from rankdump._analysis.reader.statistic_tables import is_layer_mark
from rankdump._core.record import sanitize_name
from rankdump._core.selection import list_spellings, strip_scope_prefix
from rankdump._layout.api_tree import CALL_KINDS, LAYER_KIND, parse_call_name
from rankdump.errors import ConfigError

OperatorFamily: TypeAlias = "tuple[str, bool, bool]"
"""Normalized type of the operator, whether the call is backward, and whether it is recomputed."""
CallShapes: TypeAlias = "tuple[tuple[tuple[int, ...] | None, ...], ...]"

_OPERATOR_NAMES = {
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
"""Names of the same computation in other frameworks and releases, by common name.

Names are in lower case without underscores. They decide which calls may be paired at all, so the
table is larger than troubleshooter's table in `_compat.api_pairs`, which has to find the same pairs
as that tool.
"""
OPERATOR_SYNONYMS = {
    other: name for name, others in _OPERATOR_NAMES.items() for other in others.split()
}
"""The common name of each synonym."""
_KIND_PREFIX = re.compile(
    rf"(?:{'|'.join(kind for kind in CALL_KINDS if kind != LAYER_KIND)}|Mint|Ops)_"
)
_CALL_NUMBER = re.compile(r"(?:-op[0-9]+(?:_[0-9]+)?|_[0-9]+)$")
_PATH_COMPONENT = re.compile(r"[^/.]+")
_SHARDED_CLASS_PREFIX = re.compile(r"(?<![A-Za-z0-9])(?:FSDP(?=[A-Za-z_])|Replicate(?=[A-Z_]))+")
"""Prefixes of the classes that torch creates at run time (torch.distributed.fsdp.fully_shard and
torch.distributed._composable.replicate_with_fsdp: `FSDP{class}`, `Replicate{class}`).
"""

_NAME_SEPARATOR = re.compile(r"[/._]")
_MAPPING_FORMS = "lines `name_a,name_b`, or a JSON object of such names"


@lru_cache(maxsize=1 << 12)
def normalize_operator_type(op_type: str) -> str:
    """Return the common name of an operator type, such as `linear` for `Dense` and `FSDPLinear`."""
    plain = strip_sharded_classes(_KIND_PREFIX.sub("", op_type, count=1)).lower().replace("_", "")
    return OPERATOR_SYNONYMS.get(plain, plain)


@lru_cache(maxsize=1 << 14)
def strip_sharded_classes(name: str) -> str:
    """Return a name or type with the class names that modules had before they were sharded.

    >>> strip_sharded_classes("Default/network-FSDPNet/0-FSDPBlock/FSDPBlock-op0")
    'Default/network-Net/0-Block/Block-op0'
    """
    return _SHARDED_CLASS_PREFIX.sub("", name)


def get_operator_family(call: DumpedCall) -> OperatorFamily:
    """Return the family of a call; without a common name, calls are paired only within a family."""
    return normalize_operator_type(call.op_type), call.backward, call.recomputed


def list_call_shapes(call: DumpedCall) -> CallShapes:
    """Return the normalized shapes of all inputs and outputs of a call."""
    return (
        tuple(normalize_shape(tensor.shape) for tensor in call.inputs),
        tuple(normalize_shape(tensor.shape) for tensor in call.outputs),
    )


def normalize_shape(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the sorted extents of a shape without extents of 1; None for an unknown shape.

    With this, a tensor in NHWC equals the same tensor in NCHW.
    """
    return None if shape is None else tuple(sorted(extent for extent in shape if extent != 1))


def is_numbered_call(call: DumpedCall) -> bool:
    """Return whether the call's name contains a running number, so that an extra call shifts all
    later names.
    """
    return parse_call_name(call.op_name) is not None and not is_layer_mark(call.op_name)


def parse_module_path(op_name: str) -> tuple[str, ...]:
    """Return the path of an operator in its network, without types and numbers.

    >>> parse_module_path("Default/network-Net/layer1-Sequential/0-Linear/Linear-op0")
    ('layer1', '0')
    """
    if parse_call_name(op_name) is not None:
        return ()
    whole = strip_scope_prefix(op_name).removeprefix("Default/")
    parts = _PATH_COMPONENT.findall(whole.rpartition("/")[0] or _CALL_NUMBER.sub("", whole))
    names = [part.rpartition("-")[0] or part for part in parts]
    return tuple(names[1:] if names and names[0] == "network" else names)


def list_call_spellings(call: DumpedCall) -> tuple[str, ...]:
    """Return the names by which a mapping may refer to a call: the full name, and its spelling in
    file names or, for an API call, the name without the direction. A gradient has the name of its
    operator.
    """
    api = parse_call_name(call.op_name)
    if api is not None:
        return call.op_name, api.stem
    return tuple(dict.fromkeys((*list_spellings(strip_scope_prefix(call.op_name)), call.op_name)))


def list_partner_names(call: DumpedCall, mapping: Mapping[str, str]) -> Iterator[str]:
    """Yield the names that a call of side a may have on side b, the most specific first: the mapped
    names of the call, then those of prefixes of its names, such as the path of a module.
    """
    names = list_call_spellings(call)
    for name in names:
        if name in mapping:
            yield from _spell_both_ways(mapping[name])
    for name in names:
        for edge in reversed([found.start() for found in _NAME_SEPARATOR.finditer(name)]):
            other = mapping.get(name[:edge])
            if other is not None:
                yield from _spell_both_ways(other + name[edge:])


def _spell_both_ways(name: str) -> tuple[str, str]:
    return name, sanitize_name(name)


def read_name_mapping(given: Mapping[str, str] | str | PathLike[str]) -> Mapping[str, str]:
    """Return the names of side b by names of side a; ConfigError when the mapping file is not
    valid.
    """
    if isinstance(given, Mapping):
        return given
    path = Path(fspath(given))
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(str(path), "", why, f"a file of {_MAPPING_FORMS}") from None
    return parse_name_mapping(str(path), text)


def parse_name_mapping(file: str, text: str) -> Mapping[str, str]:
    """Return the names of side b by names of side a, from the text of a file: a JSON object, or
    lines.

    ConfigError names the file and what is not valid.
    """
    if text.lstrip().startswith("{"):
        return _parse_json_mapping(file, text)
    return dict(_parse_mapping_lines(file, text))


def _parse_json_mapping(file: str, text: str) -> Mapping[str, str]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(file, "", str(error), _MAPPING_FORMS) from None
    pairs = cast("dict[str, object]", body)
    for name, other in pairs.items():
        if not isinstance(other, str) or not name or not other:
            raise ConfigError(file, name, other, "a name of side b")
    return cast("dict[str, str]", pairs)


def _parse_mapping_lines(file: str, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, comma, other = (part.strip() for part in line.partition(","))
            if not (name and comma and other):
                raise ConfigError(file, f"line {number}", line, "`name_a,name_b`")
            yield name, other
