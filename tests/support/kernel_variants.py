"""Variants of the kernels, and elements that they are tried with."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

import rankdump._kernels._native as native
from rankdump._kernels.element_moments import ELEMENT_CODES

VARIANTS = [name for name in ("plain", "avx2", "avx512") if native.select_variant(name)]
"""Variants that run here; the last one is in use, as it is after loading."""
FLOAT_NAMES = tuple(name for name in ELEMENT_CODES if "float" in name)
_SPECIALS = (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-45, -1e-45, 3e38, 6e-8)


@contextmanager
def using(variant: str) -> Generator[None]:
    """Use a variant of the compiled kernels."""
    assert native.select_variant(variant)
    try:
        yield
    finally:
        native.select_variant(VARIANTS[-1])


def get_dtype(name: str) -> np.dtype:
    return np.dtype("u2" if name == "bfloat16" else name)


def convert_elements(name: str, values: np.ndarray) -> np.ndarray:
    """Numbers as elements of a type; of bfloat16 their bits."""
    with np.errstate(all="ignore"):
        if name == "bfloat16":
            return (values.astype("f4").view("u4") >> np.uint32(16)).astype("u2")
        return values.astype(name)


def widen_elements(name: str, elements: np.ndarray) -> np.ndarray:
    """Elements as float64, the reference for all results."""
    with np.errstate(all="ignore"):
        if name == "bfloat16":
            return (elements.astype("u4") << np.uint32(16)).view("f4").astype("f8")
        return elements.astype("f8")


@dataclass(frozen=True)
class ElementRecipe:
    """How elements are made, which is shorter to print than they are."""

    name: str
    size: int
    kind: str
    seed: int
    specials: tuple[tuple[float, int], ...]
    """Special values, and the place of each, modulo the size."""

    def make(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        dtype = get_dtype(self.name)
        if self.name == "bool":
            return rng.random(self.size) < 0.5
        if self.kind == "bits":
            return np.frombuffer(rng.bytes(self.size * dtype.itemsize), dtype).copy()
        values = rng.standard_normal(self.size) * 100
        if self.kind == "relu":
            values = np.maximum(values, 0)
        elements = convert_elements(self.name, values if self.kind != "zeros" else values * 0)
        for value, place in self.specials if self.name in FLOAT_NAMES and self.size else ():
            elements[place % self.size] = convert_elements(self.name, np.array([value]))[0]
        return elements


def recipes(name: str, largest: int = 3000) -> st.SearchStrategy[ElementRecipe]:
    special = st.tuples(st.sampled_from(_SPECIALS), st.integers(0, largest))
    return st.builds(
        ElementRecipe,
        st.just(name),
        st.integers(0, largest) | st.integers(0, 40),
        st.sampled_from(("bits", "normal", "relu", "zeros")),
        st.integers(0, 1 << 32),
        st.lists(special, max_size=4).map(tuple),
    )


def place_unaligned(elements: np.ndarray, shift: int) -> tuple[np.ndarray, int]:
    """A buffer that has the elements at an odd place, and their address."""
    buffer = np.zeros(elements.nbytes + 64, np.uint8)
    buffer[shift : shift + elements.nbytes] = np.frombuffer(elements.tobytes(), np.uint8)
    return buffer, buffer.ctypes.data + shift
