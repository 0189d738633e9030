"""Commands, links, tests and benchmarks that the documents name exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from rankdump._cli.command_group import COMMAND_NAMES
from rankdump._core.drop_reasons import DROP_REASONS
from rankdumpd.main import main as rankdumpd
from rankdumpd.settings import LIVE_SETTINGS, AgentSettings

ROOT = Path(__file__).parent.parent
DEPLOYED = [each for each in (ROOT / "deploy").rglob("*") if each.is_file()]
_TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in _TOP), *(ROOT / "docs").glob("*.md"), *DEPLOYED]


def told(pattern: str) -> set[str]:
    """What a pattern finds in the code of the pages: fenced blocks, and words between backticks."""
    pieces = [p for page in PAGES for p in re.findall(r"(?s)```.*?```|`[^`]+`", page.read_text())]
    return {word for piece in pieces for word in re.findall(pattern, piece, re.MULTILINE)}


def test_make_verbs():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= told(r"^make ([a-z-]+)") <= targets


def test_every_promise_names_its_test():
    """Behind each promise of the agent stands a test that is there."""
    named = re.findall(r"`(tests/[^`:]+)::(\w+)`", (ROOT / "docs" / "guarantees.md").read_text())
    assert named
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (path, test)


def test_every_drop_reason_is_explained():
    """The table has all of them, and no other."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    section = re.search(r"(?s)^## Drop reasons$(.*?)^## ", page, re.MULTILINE)
    assert section
    cells = re.findall(r"(?m)^\| (`.*?) \|", section[1])
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(DROP_REASONS)


def test_limits_are_settings_and_a_reload_applies_them():
    """As the page says: all of its table but the memory, and the folders."""
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|", page)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert (named - {"memory_bytes"}) | {"roots"} == set(LIVE_SETTINGS["agent"])
    assert named <= {field.name for field in dataclasses.fields(AgentSettings)}


def test_commands():
    """Every `rankdump VERB` and `rankdumpd VERB` in a line of code is a command."""
    assert told(r"(?:`|^|\$ )rankdump ([a-z][a-z-]*)") == set(COMMAND_NAMES)
    assert told(r"(?:`|^|\$ )rankdumpd ([a-z]+)") == set(rankdumpd.commands)


def test_links():
    for page in PAGES:
        if page.suffix == ".md":
            for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as they are made on the web."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_to_headings():
    for page in PAGES:
        if page.suffix == ".md":
            for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
                linked = page.parent / target if target else page
                if linked.suffix == ".md" and ":" not in target:
                    assert anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def test_benchmarks():
    names = told(r"python -m bench ([a-z]+)")
    assert names
    assert all((ROOT / "bench" / f"{name}.py").exists() for name in names)


def test_decisions_have_a_number_a_date_and_a_status():
    """Law: numbers fall by one from the top, so that each can be cited; none is left out."""
    text = (ROOT / "DECISIONS.md").read_text()
    headings = re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)
    assert len(headings) == text.count("\n## ")
    numbers = [int(number) for number, _ in headings]
    assert numbers == list(range(len(numbers), 0, -1))
    form = r"^## \d+\. .+\nDate: 20\d\d-\d\d-\d\d\. Status: (accepted|superseded by .+)\.$"
    assert len(re.findall(form, text, re.MULTILINE)) == len(numbers)
