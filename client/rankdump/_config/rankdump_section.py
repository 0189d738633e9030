"""Section `rankdump` of a configuration file: how the tree is packed and delivered, and what is
recorded that no dialect has a key for. Pure. MindSpore
ignores keys it does not know, so one file serves both; here an unknown key is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Literal, NamedTuple, cast, get_args

from rankdump._config.config_section import ConfigNotes, ConfigSection
from rankdump._config.output_path import tidy_path
from rankdump._config.watch_section import parse_watch_rules
from rankdump._core.plan import (
    MAX_RING_STEPS,
    MAX_ROOT_CHARACTERS,
    MAX_TENSOR_BYTES,
    BlackBoxSettings,
    ContentSettings,
    DeliverySettings,
    FullBufferPolicy,
    OutputSettings,
    TensorSelection,
)
from rankdump._layout.profile import PROFILES
from rankdump._layout.tree_layouts import LAYOUTS

RANKDUMP_SECTION = "rankdump"
MAX_BLOCK_TIMEOUT_S = 86_400
MAX_BUFFER_BYTES = 1 << 40

_STATES_KEY = "optimizer_states"
BLACK_BOX_KEY = "blackbox"
DEFAULT_RING_STEPS = 64
_OVERHEAD_KEY = "max_step_overhead"
_FINGERPRINTS_KEY = "fingerprints"
_CARD_KEY = "card"
_BASELINE_KEY = "baseline"
_KEYS = (
    "layout",
    "profile",
    "codec",
    "on_full",
    "block_timeout_s",
    "buffer_bytes",
    "durability",
    "strict",
    _OVERHEAD_KEY,
    "shared_memory",
    "embedded",
    _STATES_KEY,
    _FINGERPRINTS_KEY,
    _CARD_KEY,
    _BASELINE_KEY,
    BLACK_BOX_KEY,
    "file_mode",
    "folder_mode",
)
# No configuration selects a dump of APIs: its calls come from a separate hook.
_LAYOUT_NAMES = tuple(name for name, layout in LAYOUTS.items() if layout.api_files is None)
# Those of `_codec.file_codec`, which would load zstandard.
_CODEC_NAMES = ("none", "zstd", "zstd-always")
_MODE_PATTERN = re.compile(r"0?[0-7]{3}")
_BLACK_BOX_KEYS = tuple(field.name for field in fields(BlackBoxSettings))
_EMPTY_BODY: dict[str, object] = {RANKDUMP_SECTION: {}}


class RankdumpSettings(NamedTuple):
    """What the section sets."""

    output: OutputSettings
    delivery: DeliverySettings
    optimizer_states: bool
    """Whether the states of optimizers that step are selected as well."""
    fingerprints: bool
    """Whether the fingerprint of each tensor is recorded as well."""
    run_card: bool
    """Whether the run card of each iteration is recorded as well."""
    baseline: str
    """Root of an earlier tree, whose tensors are not stored again; empty for none."""
    black_box: BlackBoxSettings


def parse_rankdump_section(
    body: Mapping[str, object],
    *,
    file: str,
    output: OutputSettings,
    notes: ConfigNotes,
    select_layout: Callable[[str], str] | None = None,
) -> RankdumpSettings:
    """Return what the section sets; a missing key keeps the given value.

    `select_layout` returns the layout for a profile where the section names none.
    """
    section = ConfigSection.from_body(
        body if RANKDUMP_SECTION in body else _EMPTY_BODY, RANKDUMP_SECTION, file=file, notes=notes
    )
    _check_keys(section)
    return RankdumpSettings(
        _parse_output(section, output, select_layout),
        _parse_delivery(section),
        section.read_flag(_STATES_KEY, False),
        section.read_flag(_FINGERPRINTS_KEY, False),
        section.read_flag(_CARD_KEY, True),
        _parse_baseline(section),
        _parse_black_box(section),
    )


def add_optimizer_states(
    selection: TensorSelection, settings: RankdumpSettings, notes: ConfigNotes
) -> TensorSelection:
    """Return the selection with the states of optimizers, if the section asks for them."""
    if not settings.optimizer_states:
        return selection
    if selection.trigger != "always" or selection.watched or not selection.outputs:
        reason = "has no effect: a plan without outputs or with a debug mode records no states"
        notes.add(f"{RANKDUMP_SECTION}.{_STATES_KEY}", True, reason)
    return replace(selection, optimizer_states=True)


def complete_content(
    content: ContentSettings, settings: RankdumpSettings, notes: ConfigNotes
) -> ContentSettings:
    """Return the content with fingerprints, run cards and a baseline, as far as the section asks
    for them.
    """
    if settings.fingerprints and content.on_device:
        reason = "has no effect on tensors of an accelerator: it computes their statistics alone"
        notes.add(f"{RANKDUMP_SECTION}.{_FINGERPRINTS_KEY}", True, reason)
    if settings.baseline and content.saved == "statistic":
        reason = "has no effect: no elements are stored that could be compared"
        notes.add(f"{RANKDUMP_SECTION}.{_BASELINE_KEY}", settings.baseline, reason)
    return replace(
        content,
        fingerprints=settings.fingerprints,
        run_card=settings.run_card,
        baseline=settings.baseline,
    )


def _check_keys(section: ConfigSection) -> None:
    for key in section.values:
        if key not in _KEYS:
            nearest = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
            raise section.make_error(key, f"{', '.join(_KEYS)}; nearest: {nearest}")


def _parse_baseline(section: ConfigSection) -> str:
    allowed = "the absolute path of an earlier tree"
    path = section.read_text(_BASELINE_KEY, allowed, "")
    is_valid = path.startswith("/") and "\0" not in path and len(path) <= MAX_ROOT_CHARACTERS
    if _BASELINE_KEY in section.values and not is_valid:
        raise section.make_error(_BASELINE_KEY, allowed)
    return tidy_path(path) if path else ""


def _parse_output(
    section: ConfigSection, default: OutputSettings, select_layout: Callable[[str], str] | None
) -> OutputSettings:
    profile = section.read_choice("profile", tuple(PROFILES), default=default.profile)
    layout = select_layout(profile) if select_layout else default.layout
    return replace(
        default,
        layout=section.read_choice("layout", _LAYOUT_NAMES, default=layout),
        profile=profile,
        codec=section.read_choice("codec", _CODEC_NAMES, default=default.codec),
        file_mode=_parse_file_mode(section, "file_mode", must=0o400, default=default.file_mode),
        folder_mode=_parse_file_mode(
            section, "folder_mode", must=0o700, default=default.folder_mode
        ),
    )


def _parse_delivery(section: ConfigSection) -> DeliverySettings:
    default = DeliverySettings()
    on_full = section.read_choice("on_full", get_args(FullBufferPolicy), default=default.on_full)
    durability = section.read_choice(
        "durability", ("written", "synced"), default=default.durability
    )
    return DeliverySettings(
        on_full=cast("FullBufferPolicy", on_full),
        block_timeout_s=section.read_number(
            "block_timeout_s",
            low=0,
            high=MAX_BLOCK_TIMEOUT_S,
            allowed=f"seconds from 0 to {MAX_BLOCK_TIMEOUT_S}",
            default=default.block_timeout_s,
        ),
        buffer_bytes=_parse_buffer_bytes(section, default.buffer_bytes),
        durability=cast("Literal['written', 'synced']", durability),
        strict=section.read_flag("strict", default.strict),
        shared_memory=section.read_flag("shared_memory", default.shared_memory),
        embedded=section.read_flag("embedded", default.embedded),
        max_step_overhead=section.read_number(
            _OVERHEAD_KEY,
            low=0,
            high=1,
            allowed="a share of the step from 0 (no limit) to 1",
            default=default.max_step_overhead,
        ),
    )


def _parse_buffer_bytes(section: ConfigSection, default: int) -> int:
    value = section.values.get("buffer_bytes", default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BUFFER_BYTES:
        raise section.make_error("buffer_bytes", f"whole bytes from 1 to {MAX_BUFFER_BYTES}")
    return value


def _parse_black_box(section: ConfigSection) -> BlackBoxSettings:
    value = section.values.get(BLACK_BOX_KEY, False)
    if isinstance(value, bool):
        return BlackBoxSettings(DEFAULT_RING_STEPS if value else 0)
    if not isinstance(value, dict):
        raise section.make_error(BLACK_BOX_KEY, "true, false or an object")
    name = f"{section.name}.{BLACK_BOX_KEY}"
    own = ConfigSection(section.file, name, cast("dict[str, object]", value), section.notes)
    default = BlackBoxSettings(DEFAULT_RING_STEPS)
    for key in own.values:
        if key not in _BLACK_BOX_KEYS:
            raise own.make_error(key, ", ".join(_BLACK_BOX_KEYS))

    def read(key: str, low: float, high: float, what: str) -> float:
        allowed = f"{what} from {low:g} to {high:g}"
        return own.read_number(
            key, low=low, high=high, allowed=allowed, default=getattr(default, key)
        )

    return BlackBoxSettings(
        steps=int(read("steps", 1, MAX_RING_STEPS, "steps")),
        post_steps=int(read("post_steps", 0, MAX_RING_STEPS, "steps")),
        max_overhead=read("max_overhead", 0.001, 1, "a share of the step"),
        max_bytes=int(read("max_bytes", 0, MAX_BUFFER_BYTES, "bytes")),
        pause_s=read("pause_s", 0, MAX_BLOCK_TIMEOUT_S, "seconds"),
        watch=parse_watch_rules(own),
        tensor_bytes=int(read("tensor_bytes", 0, MAX_TENSOR_BYTES, "bytes")),
    )


def _parse_file_mode(section: ConfigSection, key: str, *, must: int, default: int) -> int:
    """Return a file mode; without the bits in `must` the agent would lock itself out."""
    allowed = f'an octal text as "{default:04o}" that includes {must:04o}'
    text = section.read_text(key, allowed, f"{default:04o}")
    mode = int(text, 8) if _MODE_PATTERN.fullmatch(text) else 0
    if mode & must != must:
        raise section.make_error(key, allowed)
    return mode
