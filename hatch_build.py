"""Compiles the kernels of `rankdump._kernels` into wheels and editable installs.

Without a C compiler or Python's headers the installation succeeds all the same, and numpy computes
what the kernels would. With RANKDUMP_REQUIRE_KERNELS=1, as for releases, it fails.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path(__file__).parent / "client" / "rankdump" / "_kernels"
MODULE_NAME = "_native.abi3.so"
KERNELS = ("statistics.c", "fingerprint.c", "strided_copy.c")
"""Compiled once for each variant."""
# The last ones because sums have the same bits on every processor.
FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
    *("-fno-fast-math", "-ffp-contract=off"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
VARIANTS = {"plain": (), "avx2": _AVX2, "avx512": (*_AVX2, *_AVX512)}
"""Flags of each variant, which needs the processor and the compiler of those before it."""


class KernelBuildError(Exception):
    """The kernels cannot be compiled here."""


class KernelBuildHook(BuildHookInterface):  # pyright: ignore[reportMissingTypeArgument]
    """Adds the compiled module to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the wheel, or beside the sources for an editable install."""
        if self.target_name != "wheel":
            return
        self._folder = tempfile.TemporaryDirectory()
        editable = version == "editable"
        made = (SOURCES if editable else Path(self._folder.name)) / MODULE_NAME
        is_required = os.environ.get("RANKDUMP_REQUIRE_KERNELS") == "1"
        try:
            missing = compile_kernels(made, needs_all=is_required)
        except KernelBuildError as error:
            self._folder.cleanup()
            if is_required:
                raise
            self.app.display_warning(f"without compiled kernels: {error}")
            made.unlink(missing_ok=True)
            return
        if missing:
            self.app.display_warning(f"without kernels for {' and '.join(missing)}: old compiler")
        if not editable:
            build_data["force_include"][str(made)] = f"rankdump/_kernels/{MODULE_NAME}"
        build_data["pure_python"] = False
        name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp310-abi3-{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        if self.target_name == "wheel":
            self._folder.cleanup()


def compile_kernels(target: Path, *, needs_all: bool = False) -> tuple[str, ...]:
    """Compile the module for this machine and put it at a path, at once.

    Return the variants that the compiler is too old for; KernelBuildError with `needs_all`.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise KernelBuildError("the limited API does not cover Python without its lock")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise KernelBuildError(f"Python's headers are not in {headers}")
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), *FLAGS, f"-I{headers}"]
    with tempfile.TemporaryDirectory() as folder:
        compiler = _Compiler([*_find_compiler(), *flags], Path(folder))
        variants = _list_variants()
        made = _compile_variants(compiler, variants, needs_all=needs_all)
        has = (f"-DHAS_{variant.upper()}" for variant in made)
        digest = f'-DSOURCE_DIGEST="{digest_sources()}"'
        objects = [each for several in made.values() for each in several]
        objects.append(compiler.compile("native.c", "native", digest, *has))
        objects.append(compiler.compile("small_file.c", "small_file"))
        linked = target.with_name(f".{target.name}-{os.getpid()}")
        _run([*compiler.command, "-shared", "-s", *objects, "-o", str(linked)])
        linked.replace(target)
    return tuple(name for name in variants if name not in made)


class _Compiler(NamedTuple):
    command: list[str]
    folder: Path

    def compile(self, source: str, name: str, *flags: str) -> str:
        """Return the object that is made of a file."""
        made = str(self.folder / f"{name}.o")
        _run([*self.command, *flags, "-c", str(SOURCES / source), "-o", made])
        return made


def _compile_variants(
    compiler: _Compiler, variants: Mapping[str, tuple[str, ...]], *, needs_all: bool
) -> dict[str, list[str]]:
    """Return the objects of each variant, up to the first that cannot be compiled."""

    def compile_variant(variant: str) -> list[str]:
        flags = variants[variant]
        return [compiler.compile(each, f"{Path(each).stem}-{variant}", *flags) for each in KERNELS]

    made: dict[str, list[str]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for variant, compiling in [(each, pool.submit(compile_variant, each)) for each in variants]:
            try:
                made[variant] = compiling.result()
            except KernelBuildError:
                if needs_all or not made:
                    raise
                break
    return made


def digest_sources() -> str:
    """Return a digest of the C files, by which a compiled module tells what it was made of."""
    texts = (path.name.encode() + path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]")))
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _list_variants() -> dict[str, tuple[str, ...]]:
    """Return the variants of this machine's processors, with their flags."""
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    variants = VARIANTS if is_x86 else {"plain": ()}
    return {name: (f"-DKERNEL_VARIANT={name}", *flags) for name, flags in variants.items()}


def _find_compiler() -> list[str]:
    named = (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang")
    for command in filter(None, named):
        words = shlex.split(command)
        if shutil.which(words[0]):
            return words
    raise KernelBuildError("there is no C compiler")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelBuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
