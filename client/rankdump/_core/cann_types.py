"""Numbers and names of element types and tensor formats in CANN's `bin` files (CANN,
`dump_data.proto` and `types.h`). Pure. An unknown number is kept as it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CannDataType:
    """One element type of CANN."""

    number: int
    name: str
    """CANN's name without the prefix `DT_`."""
    element: str = ""
    """Name of the type in `_core/element_types.py`; empty if no type there holds its elements
    unchanged.
    """


_DATA_TYPE_NAMES = (
    ("UNDEFINED", ""),
    ("FLOAT", "float32"),
    ("FLOAT16", "float16"),
    ("INT8", "int8"),
    ("UINT8", "uint8"),
    ("INT16", "int16"),
    ("UINT16", "uint16"),
    ("INT32", "int32"),
    ("INT64", "int64"),
    ("UINT32", "uint32"),
    ("UINT64", "uint64"),
    ("BOOL", "bool"),
    ("DOUBLE", "float64"),
    ("STRING", ""),
    ("DUAL_SUB_INT8", ""),
    ("DUAL_SUB_UINT8", ""),
    ("COMPLEX64", "complex64"),
    ("COMPLEX128", "complex128"),
    ("QINT8", ""),
    ("QINT16", ""),
    ("QINT32", ""),
    ("QUINT8", ""),
    ("QUINT16", ""),
    ("RESOURCE", "int64"),
    ("STRING_REF", ""),
    ("DUAL", ""),
    ("VARIANT", ""),
    ("BF16", "bfloat16"),
    ("INT4", ""),
    ("UINT1", ""),
    ("INT2", ""),
    ("UINT2", ""),
    ("COMPLEX32", ""),
    ("HIFLOAT8", ""),
    ("FLOAT8_E5M2", "float8_e5m2"),
    ("FLOAT8_E4M3FN", "float8_e4m3fn"),
    ("FLOAT8_E8M0", "float8_e8m0fnu"),
    ("FLOAT6_E3M2", ""),
    ("FLOAT6_E2M3", ""),
    ("FLOAT4_E2M1", ""),
    ("FLOAT4_E1M2", ""),
    ("HIFLOAT4", ""),
    ("HIFLOAT4_SCALE", ""),
)
DATA_TYPES = {number: CannDataType(number, *names) for number, names in enumerate(_DATA_TYPE_NAMES)}
_NAME_PREFIX = "DT_"
_BY_NAME = {kind.name: kind for kind in DATA_TYPES.values()}
_RESOURCE_NUMBER = 23
DATA_TYPE_NUMBERS = {
    kind.element: kind.number
    for kind in DATA_TYPES.values()
    if kind.element and kind.number != _RESOURCE_NUMBER
}
"""CANN's number of each element type of `_core/element_types.py` that has one."""

_FORMAT_NAME_LIST = [
    "NCHW",
    "NHWC",
    "ND",
    "NC1HWC0",
    "FRACTAL_Z",
    "NC1C0HWPAD",
    "NHWC1C0",
    "FSR_NCHW",
    "FRACTAL_DECONV",
    "C1HWNC0",
    "FRACTAL_DECONV_TRANSPOSE",
    "FRACTAL_DECONV_SP_STRIDE_TRANS",
    "NC1HWC0_C04",
    "FRACTAL_Z_C04",
    "CHWN",
    "FRACTAL_DECONV_SP_STRIDE8_TRANS",
    "HWCN",
    "NC1KHKWHWC0",
    "BN_WEIGHT",
    "FILTER_HWCK",
    "HASHTABLE_LOOKUP_LOOKUPS",
    "HASHTABLE_LOOKUP_KEYS",
    "HASHTABLE_LOOKUP_VALUE",
    "HASHTABLE_LOOKUP_OUTPUT",
    "HASHTABLE_LOOKUP_HITS",
    "C1HWNCoC0",
    "MD",
    "NDHWC",
    "FRACTAL_ZZ",
    "FRACTAL_NZ",
    "NCDHW",
    "DHWCN",
    "NDC1HWC0",
    "FRACTAL_Z_3D",
    "CN",
    "NC",
    "DHWNC",
    "FRACTAL_Z_3D_TRANSPOSE",
    "FRACTAL_ZN_LSTM",
    "FRACTAL_Z_G",
    "RESERVED",
    "ALL",
    "NULL",
    "ND_RNN_BIAS",
    "FRACTAL_ZN_RNN",
    "YUV",
    "YUV_A",
    "NCL",
    "FRACTAL_Z_WINO",
    "C1HWC0",
]
FORMAT_NAMES = {**dict(enumerate(_FORMAT_NAME_LIST)), 255: "MAX"}
FORMAT_NUMBERS = {name: number for number, name in FORMAT_NAMES.items()}


@dataclass(frozen=True, slots=True)
class FormatWord:
    """Parts of the number of a tensor format (CANN, `types.h`)."""

    number: int
    """Bits 0 to 7: key in `FORMAT_NAMES`."""
    groups: int
    """Bits 8 to 23: number of groups; 0 if not given."""
    c0: int
    """Bits 24 to 27: the extent C0 that follows from them; 0 if not given."""

    @property
    def name(self) -> str:
        """Name of the format, or its number if the name is unknown."""
        return FORMAT_NAMES.get(self.number, str(self.number))


def split_format_word(word: int) -> FormatWord:
    """Return the parts of the number of a format; a number of a newer release stays whole."""
    code = word >> 24 & 0xF
    return FormatWord(word & 0xFF, word >> 8 & 0xFFFF, 1 << (code - 1) if code else 0)


def name_element_type(number: int) -> str:
    """Return numpy's name of an element type, or CANN's if numpy has none."""
    known = DATA_TYPES.get(number)
    return (known.element or known.name.lower()) if known else f"type {number}"


def normalize_element_name(text: str) -> str:
    """Return the common name of an element type that a table spells as CANN or the
    framework does.
    """
    known = _BY_NAME.get(text.removeprefix(_NAME_PREFIX)) if text.startswith(_NAME_PREFIX) else None
    return name_element_type(known.number) if known else text
