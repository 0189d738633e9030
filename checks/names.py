"""Naming rules of CONTRIBUTING.md: what a newcomer can guess, and one name for one thing.

- A class has a name of two words or more, unless it is in `GLOSSARY`.
- No two classes of the product share a name, private ones included.
- No module has a name that ends in a participle (`reading`, `rows_taken`).
- A logger is `_logger`; a limit begins with `MAX_`, not with `MOST_`.
- Statistics are called statistics, not figures, in names of modules, classes and functions.
- A function that returns whether something is so has a name that reads as a question.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sizes import ROOT, product_modules

GLOSSARY = frozenset(
    {
        # Terms that CONTRIBUTING.md explains, and that are clear without a second word.
        *("Acknowledgement", "Component", "Finding", "Layout"),
        *("Manifest", "Profile", "Recorder", "Session"),
        # Public classes of `rankdump.reader`: scripts of users import them by these names.
        *("Described", "Dump", "Entries", "Entry", "Facts", "Figures", "Filters", "Frame", "Named"),
        *("Origin", "Query", "Search", "Statistics", "Survey", "Surveyed", "Table", "Tree"),
        # Parts of the header of CANN's `bin` files, with the names of CANN's own messages.
        *("Shape", "Workspace"),
    }
)
# Nouns of the field that end like participles: a ring, a listing, a pairing of two sides; and names
# of frameworks.
_NOUNS = frozenset({"deepspeed", "embedded", "lightning", "listing", "pairing", "ring"})
_QUESTION_WORDS = frozenset(
    {
        *("is", "are", "was", "has", "have", "can", "may", "must", "needs", "should"),
        # Verbs in the third person, before which the object that is asked can be said.
        *("admits", "begins", "contains", "covers", "exceeds", "exists", "expects", "follows"),
        *("holds", "keeps", "names", "overlaps", "selects", "wants", "watches"),
    }
)
_OTHER_QUESTIONS = frozenset(
    {
        "damaged",  # public function of `rankdump.reader`
        "query",  # method of torch's events
    }
)
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")


def module_complaints(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield what is wrong with the names of one module, seen alone."""
    name = path.relative_to(ROOT)
    last = path.stem.rpartition("_")[2]
    if re.fullmatch(r"\w+(ing|ed)", last) and last not in _NOUNS:
        yield f"{name}: a module is named by a noun, not by a participle"
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bare = node.name.lstrip("_")
            if len(_WORD.findall(bare)) < 2 and bare not in GLOSSARY:
                yield f"{name}:{node.lineno}: class {node.name} needs a second word"
        for defined in _defined(node):
            speaks = re.search(r"(^|_)figures?(_|$)", defined, re.I) or "Figure" in defined
            if speaks and defined not in GLOSSARY:
                yield f"{name}:{node.lineno}: {defined} speaks of figures, the term is statistics"
            if re.match(r"_?MOST_", defined):
                yield f"{name}:{node.lineno}: {defined} is a limit, which begins with MAX_"
            if defined in {"_log", "logger", "_LOG", "LOGGER"}:
                yield f"{name}:{node.lineno}: the logger of a module is called _logger"


def question_complaints(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the functions that return whether something is so, and whose names do not ask that."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or _is_property(node):
            continue
        says_whether = (ast.get_docstring(node) or "").startswith(("Return whether", "Whether"))
        name = node.name.lstrip("_")
        is_special = node.name.startswith("__") or name in _OTHER_QUESTIONS
        if says_whether and not is_special and name.partition("_")[0] not in _QUESTION_WORDS:
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield f"{where}: {node.name} returns whether something is so: its name begins with is_"


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).endswith("property") for each in node.decorator_list)


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def shared_names(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield the names that two classes have."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"class {name} is defined in {len(where)} modules: {', '.join(where)}"


def main() -> int:
    """Print all complaints; the exit code says whether there is any."""
    trees = {path: ast.parse(path.read_text()) for path in product_modules()}
    found = [line for path, tree in trees.items() for line in module_complaints(path, tree)]
    found += [line for path, tree in trees.items() for line in question_complaints(path, tree)]
    found += shared_names(trees)
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
