"""Size limits of the code: lines of a module and of a function, and a docstring in every module."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_MODULE_LINES = 700
MAX_FUNCTION_LINES = 60


def product_modules() -> list[Path]:
    """Return the modules that people write: generated ones are left out."""
    found = (path for half in ("client", "daemon") for path in (ROOT / half).rglob("*.py"))
    return sorted(path for path in found if "v1" not in path.parts)


def complaints(path: Path) -> Iterator[str]:
    """Yield what is wrong with the sizes of one module."""
    text = path.read_text()
    tree = ast.parse(text)
    name = path.relative_to(ROOT)
    lines = text.count("\n")
    if lines > MAX_MODULE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_MODULE_LINES} are allowed"
    if not ast.get_docstring(tree):
        yield f"{name}: the module has no docstring"
    if path.name == "__init__.py" and path.parent.name != "rankdump":
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield f"{name}:{node.lineno}: {node.name} is logic, an __init__.py only exports"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                limit = f"at most {MAX_FUNCTION_LINES} are allowed"
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, {limit}"


def main() -> int:
    """Print all complaints; the exit code says whether there is any."""
    found = [line for path in product_modules() for line in complaints(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
