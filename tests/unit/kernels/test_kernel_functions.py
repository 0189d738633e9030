"""Which kernels are loaded, and that the installation compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hatch_build import digest_sources
from support.kernel_variants import VARIANTS

import rankdump._kernels._native as native
from rankdump._kernels import numpy_twin
from rankdump._kernels.element_moments import ELEMENT_CODES
from rankdump._kernels.kernel_functions import KERNELS_VARIABLE, load_kernels

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fastest_variant():
    yield
    native.select_variant(VARIANTS[-1])


@pytest.mark.usefixtures("fastest_variant")
def test_variable_chooses_the_kernels():
    assert load_kernels("").functions is native
    assert load_kernels("").is_compiled
    for variant in VARIANTS:
        assert load_kernels(variant).description == f"compiled, {variant}"
        assert native.get_variant() == variant
    chosen = load_kernels("numpy")
    assert (chosen.functions, chosen.is_compiled) == (numpy_twin, False)
    assert chosen.description == "numpy, RANKDUMP_KERNELS is 'numpy'"
    unknown = load_kernels("avx9")
    assert unknown.functions is numpy_twin
    assert unknown.description == "numpy, RANKDUMP_KERNELS is 'avx9', which does not run here"


def test_numpy_stands_in_for_a_module_that_is_absent_or_broken(tmp_path: Path):
    """An installation without a compiler works, and says why it is slower."""
    probe = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.endswith('_kernels._native'): raise ERROR\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from rankdump._kernels.kernel_functions import KERNELS\n"
        "print(KERNELS.description, KERNELS.is_compiled)\n"
    )
    for error, description in (
        ("ModuleNotFoundError(name)", "numpy, installed without a C compiler False\n"),
        ("ImportError('undefined symbol: x')", "numpy, undefined symbol: x False\n"),
    ):
        code = probe.replace("ERROR", error)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == description, done.stderr


@pytest.mark.parametrize("missing", ["encode_varint", "write_small_files"])
def test_numpy_stands_in_for_a_module_of_an_older_library(
    monkeypatch: pytest.MonkeyPatch, missing: str
):
    monkeypatch.delattr(native, missing)
    older = load_kernels("")
    assert older.functions is numpy_twin
    assert "older than the library: install it again" in older.description


def test_environment_chooses_the_kernels_of_a_process():
    code = "from rankdump._kernels.kernel_functions import KERNELS; print(KERNELS.description)"
    for wanted in ("numpy", *VARIANTS):
        environment = os.environ | {KERNELS_VARIABLE: wanted}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert wanted in done.stdout, done.stderr


def test_codes_are_those_of_the_header():
    text = (ROOT / "client/rankdump/_kernels/kernels.h").read_text()
    body = text.split("enum element_code {")[1].split("};")[0]
    names = [name.strip().removeprefix("ELEMENT_").lower() for name in body.split(",")]
    assert names == [*ELEMENT_CODES, "codes"]


def test_kernels_in_use_are_compiled_from_the_sources_here():
    """Else tests would judge a module of yesterday."""
    assert digest_sources() == native.SOURCE_DIGEST, "make setup compiles them"


def test_kernels_run_in_a_child_of_fork():
    """No state survives a call, so a fork beside one leaves nothing locked."""
    child = os.fork()
    if not child:
        os._exit(
            0 if native.measure_elements(bytes(8), 2, ELEMENT_CODES["float32"], 7)[0] == 2 else 1
        )
    assert os.waitpid(child, 0)[1] == 0
