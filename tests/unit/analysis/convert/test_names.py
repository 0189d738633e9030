"""Names of converted files."""

from __future__ import annotations

import os
import uuid

from hypothesis import given
from hypothesis import strategies as st

from rankdump._analysis.convert.conversion import hash_name, shorten_name


def test_hash_name_of_a_known_name():
    """Known name and digest of msaccucmp."""
    assert hash_name("x" * 300) == "8f34175878753437b7192159039844c3"


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=300))
def test_hash_name_equals_uuid3(name):
    assert hash_name(name) == uuid.uuid3(uuid.NAMESPACE_DNS, name).hex


def test_shorten_name_limits_bytes():
    """254 characters stay; bytes count as well, and a name need not be text."""
    assert shorten_name("n" * 250 + ".npy") == "n" * 250 + ".npy"
    assert shorten_name("n" * 251 + ".npy") == hash_name("n" * 251 + ".npy") + ".npy"
    assert shorten_name("\u00e9" * 126 + ".npy").endswith(".npy")
    assert len(shorten_name("\u00e9" * 126 + ".npy")) == 36
    assert len(shorten_name(os.fsdecode(b"\xff" * 260 + b".bin"))) == 36
