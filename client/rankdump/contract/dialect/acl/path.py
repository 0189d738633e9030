"""Where the tree of an `acl.json` goes. Pure: what is on the disk is asked of a probe."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rankdump.contract.dialect.acl.types import BAD_VALUE, WRONG_TYPE, coded, text
from rankdump.contract.dialect.disk import Probe, unreplaced
from rankdump.contract.dialect.root import overridden
from rankdump.contract.dialect.section import Section

MAX_PATH = 512
EXCEPTION_FOLDER = "extra-info/data-dump"
_HOST = re.compile(r"([0-9]+)\.([0-9]+)\.([0-9]+)\.([0-9]+)")
_CHARACTERS = re.compile(r"[A-Za-z0-9=\[\];\\,./!@#$%^&*()_+{}:?-]+")
_ALLOWED = f"a folder of 1 to {MAX_PATH} characters, or IPv4:folder"
_EXCEPTION_VARIABLES = ("ASCEND_DUMP_PATH", "ASCEND_WORK_PATH")


def parse_path(dump: Section, environ: Mapping[str, str], probe: Probe) -> str:
    """Return the absolute root of a dump of data or of overflow."""
    path = text(dump, "dump_path")
    if not path:
        raise coded(dump, "dump_path", _ALLOWED, WRONG_TYPE)
    if len(path.encode("utf-8", "surrogatepass")) > MAX_PATH:
        raise coded(dump, "dump_path", _ALLOWED, BAD_VALUE)
    override = overridden(environ, dump.file)
    host, colon, folder = path.partition(":")
    if colon and not folder:
        raise coded(dump, "dump_path", "a folder behind the colon", BAD_VALUE)
    if colon and _HOST.fullmatch(host):
        _check_remote(dump, host, folder)
        if not override:
            where = f"{folder}{unreplaced(folder)}"
            dump.note("dump_path", f"names another host; it is written here, to {where}")
        return override or probe(folder).absolute
    if override:
        return override
    facts = probe(path)
    if facts.fault:
        raise coded(dump, "dump_path", facts.fault, BAD_VALUE)
    return facts.absolute


def _check_remote(dump: Section, host: str, folder: str) -> None:
    if not all(len(octet) <= 3 and int(octet) <= 255 for octet in host.split(".")):
        raise coded(dump, "dump_path", "an IPv4 address of numbers from 0 to 255", BAD_VALUE)
    if not _CHARACTERS.fullmatch(folder):
        allowed = "letters, digits and -=[];\\,./!@#$%^&*()_+{}:? behind the address"
        raise coded(dump, "dump_path", allowed, BAD_VALUE)


def exception_root(dump: Section, environ: Mapping[str, str], probe: Probe) -> str:
    """Return the absolute root of a dump of the operator that raised; no folder has to exist."""
    override = overridden(environ, dump.file)
    if override:
        return override
    variable = next((name for name in _EXCEPTION_VARIABLES if environ.get(name)), "")
    path = text(dump, "dump_path")
    if variable and path:
        dump.note("dump_path", f"gives way to {variable}: {environ[variable]}")
    elif unreplaced(path):
        dump.note("dump_path", f"is taken as it stands{unreplaced(path)}")
    base = environ.get(variable, "") or path or "."
    return f"{probe(base).absolute.rstrip('/')}/{EXCEPTION_FOLDER}"


def off_root(environ: Mapping[str, str], file: str, probe: Probe) -> str:
    """Return what stands for the root of a configuration that enables nothing."""
    return overridden(environ, file) or probe(".").absolute
