"""Section `rankdump` of a configuration file: how the tree is packed and delivered; what is
recorded in addition to what dialects have keys for; and the watch rules of the black box. Pure.
MindSpore ignores unknown keys, so one file serves both; in this section an unknown key is an error.

A file that has only this section selects no tensor: a job that uses it has a black box and nothing
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Literal, NamedTuple, cast, get_args

from rankdump._config.config_section import ConfigNotes, ConfigSection
from rankdump._config.output_path import parse_output_root, tidy_path
from rankdump._core.plan import (
    MAX_GLOB_CHARACTERS,
    MAX_RING_STEPS,
    MAX_ROOT_CHARACTERS,
    MAX_RULE_PATTERNS,
    MAX_RULE_STEPS,
    MAX_RULES,
    MAX_TENSOR_BYTES,
    MIN_UNCHANGED_STEPS,
    WATCH_ACTIONS,
    WATCH_CONDITIONS,
    BlackBoxSettings,
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    FullBufferPolicy,
    IterationSelection,
    OutputSettings,
    TensorSelection,
    WatchAction,
    WatchCondition,
    WatchRule,
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
RANKDUMP_KEYS = (
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
# Layouts of API dumps are left out, because no configuration selects such a dump: its calls come
# from a separate hook.
_LAYOUT_NAMES = tuple(name for name, layout in LAYOUTS.items() if layout.api_files is None)
# The names are those of `_codec.file_codec`, whose import would load zstandard.
_CODEC_NAMES = ("none", "zstd", "zstd-always")
_MODE_PATTERN = re.compile(r"0?[0-7]{3}")
_BLACK_BOX_KEYS = tuple(field.name for field in fields(BlackBoxSettings))
_EMPTY_BODY: dict[str, object] = {RANKDUMP_SECTION: {}}


class RankdumpSettings(NamedTuple):
    """Settings of the section."""

    output: OutputSettings
    delivery: DeliverySettings
    optimizer_states: bool
    """Whether the states of the optimizers that step are selected too."""
    fingerprints: bool
    """Whether the fingerprint of each tensor is recorded too."""
    run_card: bool
    """Whether the run card of each iteration is recorded too."""
    baseline: str
    """Root of an earlier tree whose tensors are not stored again; empty for none."""
    black_box: BlackBoxSettings

    def make_plan(
        self,
        selection: TensorSelection,
        content: ContentSettings,
        *,
        dialect: str,
        notes: ConfigNotes,
        enabled: bool = True,
    ) -> DumpPlan:
        """Return the plan of a dialect, completed with the settings of this section; the notes
        become its warnings.
        """
        return DumpPlan(
            output=self.output,
            selection=_add_optimizer_states(selection, self, notes),
            content=_complete_content(content, self, notes),
            delivery=self.delivery,
            black_box=self.black_box,
            dialect=dialect,
            warnings=notes.texts,
            enabled=enabled,
        )


def parse_rankdump_section(
    body: Mapping[str, object],
    *,
    file: str,
    output: OutputSettings,
    notes: ConfigNotes,
    select_layout: Callable[[str], str] | None = None,
) -> RankdumpSettings:
    """Return the settings of the section; a missing key keeps the given value.

    `select_layout` returns the layout for a profile if the section names none.
    """
    section = ConfigSection.from_body(
        body if RANKDUMP_SECTION in body else _EMPTY_BODY, RANKDUMP_SECTION, file=file, notes=notes
    )
    section.reject_unknown_keys(RANKDUMP_KEYS)
    return RankdumpSettings(
        _parse_output(section, output, select_layout),
        _parse_delivery(section),
        section.read_flag(_STATES_KEY, False),
        section.read_flag(_FINGERPRINTS_KEY, False),
        section.read_flag(_CARD_KEY, True),
        _parse_baseline(section),
        _parse_black_box(section),
    )


def _add_optimizer_states(
    selection: TensorSelection, settings: RankdumpSettings, notes: ConfigNotes
) -> TensorSelection:
    """Return the selection, with the states of optimizers if the section asks for them."""
    if not settings.optimizer_states:
        return selection
    if selection.trigger != "always" or selection.watched or not selection.outputs:
        reason = "has no effect: a plan without outputs or with a debug mode records no states"
        notes.add(f"{RANKDUMP_SECTION}.{_STATES_KEY}", True, reason)
    return replace(selection, optimizer_states=True)


def _complete_content(
    content: ContentSettings, settings: RankdumpSettings, notes: ConfigNotes
) -> ContentSettings:
    """Return the content settings, with fingerprints, run cards and a baseline as far as the
    section asks for them.
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
        buffer_bytes=section.read_integer(
            "buffer_bytes",
            1,
            MAX_BUFFER_BYTES,
            allowed=f"whole bytes from 1 to {MAX_BUFFER_BYTES}",
            default=default.buffer_bytes,
        ),
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


def _parse_black_box(section: ConfigSection) -> BlackBoxSettings:
    value = section.values.get(BLACK_BOX_KEY, False)
    if isinstance(value, bool):
        return BlackBoxSettings(DEFAULT_RING_STEPS if value else 0)
    own = section.make_part(BLACK_BOX_KEY, value)
    if own is None:
        raise section.make_error(BLACK_BOX_KEY, "true, false or an object")
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
    """Return a file mode, which must have the bits in `must`: otherwise the agent could not access
    its own files.
    """
    allowed = f'an octal text as "{default:04o}" that includes {must:04o}'
    text = section.read_text(key, allowed, f"{default:04o}")
    mode = int(text, 8) if _MODE_PATTERN.fullmatch(text) else 0
    if mode & must != must:
        raise section.make_error(key, allowed)
    return mode


WATCH_KEY = "watch"
_RULE_KEYS = ("when", "operators", "value", "steps", "do", "iterations")
_OPERATORS_ALLOWED = (
    f"a list of 1 to {MAX_RULE_PATTERNS} globs over names or types of operators, each of 1 to "
    f"{MAX_GLOB_CHARACTERS} characters"
)
_MAX_VALUE = 1e308


def parse_watch_rules(section: ConfigSection) -> tuple[WatchRule, ...]:
    """Return the watch rules; ConfigError names the first wrong rule and its key."""
    if WATCH_KEY not in section.values:
        return ()
    allowed = f"a list of up to {MAX_RULES} objects"
    bodies = section.read_array(WATCH_KEY, allowed)
    if len(bodies) > MAX_RULES:
        raise section.make_error(WATCH_KEY, allowed)
    return tuple(_parse_rule(section, place, body) for place, body in enumerate(bodies))


def _parse_rule(section: ConfigSection, place: int, body: object) -> WatchRule:
    key = f"{WATCH_KEY}[{place}]"
    rule = section.make_part(key, body)
    if rule is None:
        raise section.make_part_error(key, body, f"an object with {', '.join(_RULE_KEYS)}")
    rule.reject_unknown_keys(_RULE_KEYS)
    when = cast("WatchCondition", rule.read_choice("when", WATCH_CONDITIONS))
    do = cast("WatchAction", rule.read_choice("do", WATCH_ACTIONS, default="note"))
    if do != "dump" and "iterations" in rule.values:
        raise rule.make_error("iterations", "no number: the action dump alone has one")
    return WatchRule(
        when=when,
        operators=_parse_operators(rule),
        value=_parse_value(rule, when),
        steps=_parse_steps(rule, "steps", MIN_UNCHANGED_STEPS if when == "unchanged" else 1),
        do=do,
        iterations=_parse_steps(rule, "iterations", 1),
    )


def _parse_operators(rule: ConfigSection) -> tuple[str, ...]:
    if "operators" not in rule.values:
        return ()
    globs = rule.read_array("operators", _OPERATORS_ALLOWED)
    texts = tuple(glob for glob in globs if isinstance(glob, str))
    if len(texts) != len(globs) or not 1 <= len(texts) <= MAX_RULE_PATTERNS:
        raise rule.make_error("operators", _OPERATORS_ALLOWED)
    if not all(1 <= len(text) <= MAX_GLOB_CHARACTERS for text in texts):
        raise rule.make_error("operators", _OPERATORS_ALLOWED)
    return texts


def _parse_value(rule: ConfigSection, when: WatchCondition) -> float:
    allowed = f"the largest magnitude that is allowed, from 0 to {_MAX_VALUE:g}"
    if when != "too_large":
        if "value" in rule.values:
            raise rule.make_error("value", "no value: the condition too_large alone has one")
        return 0.0
    if "value" not in rule.values:
        raise rule.make_error("value", allowed)
    return rule.read_number("value", low=0, high=_MAX_VALUE, allowed=allowed, default=0.0)


def _parse_steps(rule: ConfigSection, key: str, least: int) -> int:
    allowed = f"a whole number of {key} from {least} to {MAX_RULE_STEPS}"
    return rule.read_integer(key, least, MAX_RULE_STEPS, allowed=allowed, default=least)


_PATH_KEY = "path"
BLACK_BOX_VARIABLE = "RANKDUMP_BLACKBOX"
"""Variable that gives a job a black box, whatever its configuration says, if its value is neither
empty nor `0`.
"""


def is_black_box_forced(environ: Mapping[str, str]) -> bool:
    """Return whether the environment switches the black box on."""
    return environ.get(BLACK_BOX_VARIABLE, "0") not in ("", "0")


def force_black_box(plan: DumpPlan, environ: Mapping[str, str]) -> DumpPlan:
    """Return the plan, with a black box if the environment switches one on."""
    if plan.black_box.steps or not is_black_box_forced(environ):
        return plan
    return replace(plan, black_box=BlackBoxSettings(DEFAULT_RING_STEPS))


def is_own_config(body: Mapping[str, object]) -> bool:
    """Return whether a document has the section `rankdump` and no other."""
    return tuple(body) == (RANKDUMP_SECTION,)


def parse_own_config(
    body: Mapping[str, object],
    *,
    file: str,
    environ: Mapping[str, str],
    notes: ConfigNotes,
) -> DumpPlan:
    """Return the plan of a document; `rankdump.path` is the root of the tree, unless
    RANKDUMP_OUTPUT names one.
    """
    section = ConfigSection.from_body(body, RANKDUMP_SECTION, file=file, notes=notes)
    rest = {key: value for key, value in section.values.items() if key != _PATH_KEY}
    own = parse_rankdump_section(
        {RANKDUMP_SECTION: rest},
        file=file,
        output=OutputSettings(parse_output_root(section, environ)),
        notes=notes,
    )
    if not own.black_box.steps:
        notes.add(RANKDUMP_SECTION, section.values, "selects no tensor and has no blackbox")
    return own.make_plan(
        TensorSelection(iterations=IterationSelection("none", ())),
        ContentSettings(),
        dialect="rankdump",
        notes=notes,
    )
