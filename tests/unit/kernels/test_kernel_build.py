"""The hook that compiles the kernels when the package is built."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import hatch_build
import pytest
from hatch_build import KernelBuildError, KernelBuildHook, compile_kernels

ROOT = Path(__file__).parents[3]


class ShownWarnings:
    """Where hatchling shows warnings."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def display_warning(self, text: str) -> None:
        self.texts.append(text)


def run_hook(version: str) -> tuple[dict[str, Any], list[str]]:
    shown = ShownWarnings()
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    hook = KernelBuildHook(str(ROOT), {}, None, None, "", "wheel", shown)  # type: ignore
    hook.initialize(version, data)
    assert all(Path(made).is_file() for made in data["force_include"])
    hook.finalize(version, data, "")
    return data, shown.texts


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "absent-cc -O2")


@pytest.mark.usefixtures("no_compiler")
def test_wheel_without_a_compiler_is_one_for_any_machine(monkeypatch: pytest.MonkeyPatch):
    data, warnings = run_hook("standard")
    assert data == {"force_include": {}, "pure_python": True}
    assert warnings == ["without compiled kernels: there is no C compiler"]
    monkeypatch.setenv("RANKDUMP_REQUIRE_KERNELS", "1")
    with pytest.raises(KernelBuildError, match="no C compiler"):
        run_hook("standard")


def test_wheel_with_kernels_names_interface_and_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hatch_build, "compile_kernels", lambda made, **_: made.touch() or ())
    data, warnings = run_hook("standard")
    assert list(data["force_include"].values()) == ["rankdump/_kernels/_native.abi3.so"]
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert (data["tag"], data["pure_python"], warnings) == (f"cp310-abi3-{machine}", False, [])


def write_old_compiler(path: Path, unknown: str, *, then: str) -> str:
    """Write a compiler that refuses an option, and does something else without it."""
    path.write_text(f"""#!/bin/sh
case " $* " in *" {unknown} "*) echo "unrecognized option {unknown}" >&2; exit 1;; esac
{then}
""")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one variant elsewhere")
@pytest.mark.parametrize(
    ("unknown", "missing"),
    [("-mprefer-vector-width=512", ["avx512"]), ("-mavx2", ["avx2", "avx512"])],
)
def test_variants_that_an_old_compiler_does_not_know_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unknown: str, missing: list[str]
):
    """GCC 7 knows AVX-512 without a preferred width. Nothing is optimised: that takes seconds."""
    monkeypatch.setenv("CC", write_old_compiler(tmp_path / "old-cc", unknown, then="exit 0"))
    made = tmp_path / "_native.abi3.so"
    with pytest.raises(KernelBuildError, match=f"unrecognized option {unknown}"):
        compile_kernels(made, needs_all=True)
    write_old_compiler(tmp_path / "old-cc", unknown, then='exec cc "$@" -O0')
    assert list(compile_kernels(made)) == missing
    ask = f"import _native; print(*map(_native.select_variant, {[*missing, 'plain']}))"
    run = [sys.executable, "-c", ask]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False"] * len(missing) + ["True"]


def test_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CFLAGS", "-DBLOCK_ELEMENTS=none -Werror -fsyntax-only")
    with pytest.raises(KernelBuildError, match="BLOCK_ELEMENTS"):
        compile_kernels(tmp_path / "made.so")
    assert list(tmp_path.iterdir()) == []


def test_python_without_headers_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(KernelBuildError, match="headers are not in"):
        compile_kernels(tmp_path / "made.so")


def test_sources_use_nothing_that_differs_between_pythons():
    """What a new Python makes of it would break the references of an older one, or be refused."""
    sources = list((ROOT / "client/rankdump/_kernels").glob("*.c"))
    assert sources
    for source in sources:
        text = source.read_text()
        assert not re.search(r'Py_BuildValue\("[^"]*#', text)
        assert not re.search(r"Py_RETURN_(NONE|TRUE|FALSE);", text)
