"""MindSpore's words and numbers for element types. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.graph import TensorType
from rankdump.contract.key import one_line
from rankdump.wire.v1 import model_pb2


@dataclass(frozen=True, slots=True)
class Kind:
    """One element type as graphs name it."""

    label: str
    number: model_pb2.DataType.ValueType


_KINDS = {
    "bool": Kind("Bool", model_pb2.DT_BOOL),
    "int8": Kind("Int8", model_pb2.DT_INT8),
    "int16": Kind("Int16", model_pb2.DT_INT16),
    "int32": Kind("Int32", model_pb2.DT_INT32),
    "int64": Kind("Int64", model_pb2.DT_INT64),
    "uint8": Kind("UInt8", model_pb2.DT_UINT8),
    "uint16": Kind("UInt16", model_pb2.DT_UINT16),
    "uint32": Kind("UInt32", model_pb2.DT_UINT32),
    "uint64": Kind("UInt64", model_pb2.DT_UINT64),
    "float16": Kind("Float16", model_pb2.DT_FLOAT16),
    "float32": Kind("Float32", model_pb2.DT_FLOAT32),
    "float64": Kind("Float64", model_pb2.DT_FLOAT64),
    "bfloat16": Kind("BFloat16", model_pb2.DT_BFLOAT16),
    "complex64": Kind("Complex64", model_pb2.DT_UNDEFINED),
    "complex128": Kind("Complex128", model_pb2.DT_UNDEFINED),
}


def kind_of(dtype: str) -> Kind:
    """Return MindSpore's word and number; a type it has no number for keeps its own name."""
    return _KINDS.get(dtype) or Kind(one_line(dtype), model_pb2.DT_UNDEFINED)


def shape_text(kind: TensorType) -> str:
    """Return the extents as `(8, 1)`."""
    return f"({', '.join(map(str, kind.shape))})"
