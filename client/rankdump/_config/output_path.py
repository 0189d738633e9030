"""Output root of a dump: `path` of MindSpore's configuration or the value that the environment sets
for it; the value that the environment sets for the baseline; and facts about a path on the disk as
values. Pure: the disk is examined by a `PathProbe`.

Source: MindSpore 2.3, Dump guide. RANKDUMP_OUTPUT and RANKDUMP_BASELINE are rankdump's own and
override every other setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rankdump._config.config_section import ConfigSection
from rankdump._core.plan import DumpPlan
from rankdump.errors import ConfigError

_SHELL_WORD = re.compile(r"\$\w+|\$\{\w+\}|(?:^|(?<=/))~\w*")


def describe_shell_word(path: str) -> str:
    """Return the end of a sentence about a word in a path that a shell would have expanded; empty
    if there is none.

    >>> describe_shell_word("$HOME/dump")
    ': rankdump does not expand $HOME'
    """
    word = _SHELL_WORD.search(path)
    return f": rankdump does not expand {word[0]}" if word else ""


@dataclass(frozen=True, slots=True)
class PathFacts:
    """Facts about a path on the disk."""

    absolute: str
    exists: bool = False
    directory: bool = False
    accessible: bool = False
    """Whether this process may read and write there."""

    @property
    def fault(self) -> str:
        """Phrase for what the path should be to be a writable folder; empty if it is one."""
        if not self.exists:
            return f"a folder that exists{describe_shell_word(self.absolute)}"
        if not self.directory:
            return "a folder, not a file"
        return "" if self.accessible else "a folder that this process may read and write"


PathProbe = Callable[[str], PathFacts]
"""Examines a path, which may be relative to the working directory."""


OUTPUT_VARIABLE = "RANKDUMP_OUTPUT"
BASELINE_VARIABLE = "RANKDUMP_BASELINE"
DEFAULT_ROOT_VARIABLE = "MS_DIAGNOSTIC_DATA_PATH"
DEFAULT_FOLDER = "debug_dump"

_ROOT_PATTERN = re.compile(r"/[A-Za-z0-9_/-]*")
_ALLOWED_ROOT = "an absolute folder of A-Z a-z 0-9 _ - and /"
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
"""Linux's limits in bytes for one name and for a whole path."""


def parse_output_root(common: ConfigSection, environ: Mapping[str, str]) -> str:
    """Return the absolute root; an invalid `path` is rejected even if the environment
    overrides it.
    """
    path = common.read_text("path", _ALLOWED_ROOT, "")
    if path and not _ROOT_PATTERN.fullmatch(path):
        raise common.make_error("path", _ALLOWED_ROOT + describe_shell_word(path))
    root = read_root_override(environ, common.file) or tidy_path(
        path or _make_default_root(common, environ)
    )
    if len(root) > _MAX_PATH_BYTES or any(len(name) > _MAX_NAME_BYTES for name in root.split("/")):
        common.add_note("path", "is longer than file systems allow: no file can be written", root)
    return root


def read_root_override(environ: Mapping[str, str], file: str) -> str:
    """Return the root in RANKDUMP_OUTPUT, which replaces any other; empty if it is not set."""
    override = environ.get(OUTPUT_VARIABLE, "")
    if override and not override.startswith("/"):
        raise ConfigError(file, OUTPUT_VARIABLE, override, "an absolute folder")
    return tidy_path(override) if override else ""


def replace_baseline(plan: DumpPlan, environ: Mapping[str, str]) -> DumpPlan:
    """Return the plan with the baseline in RANKDUMP_BASELINE, which replaces any other."""
    root = environ.get(BASELINE_VARIABLE, "")
    if root and not root.startswith("/"):
        raise ConfigError("environment", BASELINE_VARIABLE, root, "an absolute folder")
    return replace(plan, content=replace(plan.content, baseline=tidy_path(root))) if root else plan


def _make_default_root(common: ConfigSection, environ: Mapping[str, str]) -> str:
    base = environ.get(DEFAULT_ROOT_VARIABLE, "")
    if not base:
        raise common.make_error("path", f"{_ALLOWED_ROOT}, here or in {DEFAULT_ROOT_VARIABLE}")
    if not _ROOT_PATTERN.fullmatch(base):
        raise ConfigError(
            common.file, DEFAULT_ROOT_VARIABLE, base, _ALLOWED_ROOT + describe_shell_word(base)
        )
    return f"{base}/{DEFAULT_FOLDER}"


def tidy_path(path: str) -> str:
    """Return an absolute path without double slashes and without a slash at the end."""
    return "/" + "/".join(part for part in path.split("/") if part)
