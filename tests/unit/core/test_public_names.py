"""The public names of rankdump; every other module or package of it is private."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import rankdump

PUBLIC_NAMES = {
    "rankdump": """
        Session attach compare dump_start dump_stop layout limit microbatch note open set_dump
        step
    """,
    "rankdump.acl": """
        BAD_CONFIGURATION INITIALISED_TWICE INTERNAL NOT_INITIALISED NO_PATH OK UNPARSABLE
        UNREADABLE_FILE finalize_dump init_dump set_dump
    """,
    "rankdump.control": """
        ControlResult ControlledRank freeze set_iterations set_operators set_saved_data start stop
    """,
    "rankdump.errors": """
        ConfigError CorruptedError EmptyFileError ExhaustedError ForbiddenError PermanentError
        ProtocolError QueryError RankdumpError RejectedError ResendError RetryableError
        UnavailableError UnsupportedError
    """,
    "rankdump.integrations": "accelerate deepspeed fabric lightning torchtitan transformers",
    "rankdump.integrations.accelerate": "attach",
    "rankdump.integrations.deepspeed": "attach",
    "rankdump.integrations.fabric": "attach",
    "rankdump.integrations.torchtitan": "attach",
    "rankdump.migrator": """
        api_dump_compare api_dump_init api_dump_start api_dump_stop step
    """,
    "rankdump.reader": """
        ConvertedTensor Described Dump Entries Entry Facts Figures FileElements Filters Frame
        IrOperator ModelSummary Named Opened Origin OriginalLayout PublishedOrder Query RankCard
        RunCard Search Statistics Survey Surveyed Table Tree check_ours collector_paused
        convert_format damaged described disk_room
        facts facts_of faults findings graph_files
        load load_file load_member locate named observe open opened ranges read_hints read_order
        retired_sentences selected statistics status status_of walk
    """,
    "rankdump.tf": "DumpConfig",
}
IN_FRAMEWORKS = {"rankdump.integrations": {"lightning", "transformers"}}
"""Modules that cannot be imported without their framework; tests/frameworks has their names."""
GENERATED_PACKAGES = {"dumpdata", "wire"}
READING_PAGE = Path(__file__).parents[3] / "docs" / "reading.md"


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_are_these_and_exist(module: str):
    """A name that users may rely on comes or goes on purpose only."""
    public = importlib.import_module(module)
    assert sorted(public.__all__) == sorted(PUBLIC_NAMES[module].split())
    absent = IN_FRAMEWORKS.get(module, set())
    assert all(hasattr(public, name) for name in public.__all__ if name not in absent)


def test_modules_other_than_public_ones_are_private():
    """A module or package of rankdump that is neither public nor generated begins with `_`."""
    (folder,) = map(Path, rankdump.__path__)
    modules = {path.stem for path in folder.glob("*.py")}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    public = {f"{name}.".split(".")[1] for name in PUBLIC_NAMES} - {""}
    assert {name for name in modules if not name.startswith("_")} == public | GENERATED_PACKAGES


def test_errors_are_all_public_and_documented():
    """Every exception of `rankdump.errors` is exported, and docs/reading.md lists it."""
    errors = importlib.import_module("rankdump.errors")
    defined = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, BaseException)
    }
    assert defined == set(errors.__all__)
    page = READING_PAGE.read_text()
    assert [name for name in errors.__all__ if f"`{name}`" not in page] == []
