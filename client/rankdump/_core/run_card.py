"""Run card of one rank and iteration: what the iteration was computed from, before its first
operator ran. Pure.

A manifest has it as the value `card`. Digests are hexadecimal: xxh3-64 for the batch and the states
of generators, the first word of a fingerprint for parameters, which adds up over shards
(`_core/tensor_fingerprint.py`). No text of a card may be a secret; `_recorder/run_card_recorder.py`
masks secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from rankdump._core.json_values import make_plain, read_json
from rankdump.errors import CorruptedError

CARD_VERSION = 1
MAX_CARD_BYTES = 1 << 18
"""Maximum size of a card; a larger card is neither sent nor accepted."""
LEARNING_RATE_PREFIX = "learning_rate."
BATCH_PREFIX = "batch."
RANDOM_PREFIX = "random."
LOCAL_VARIABLES = frozenset(
    ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
)
"""Environment variables that may differ from rank to rank."""
_MAX_DEPTH_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_DIGEST_DIGITS = 16


def _make_texts() -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Summary of the parameters of one attached model, with their logical shapes."""

    name: str
    parameters: int
    elements: int
    digest: str
    """xxh3-64 of the names and shapes of all parameters."""
    dtypes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of parameters by element type."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """The run card of one iteration of one rank."""

    command: tuple[str, ...] = ()
    """Command line of the process, with secrets masked."""
    versions: Mapping[str, str] = field(default_factory=_make_texts)
    environment: Mapping[str, str] = field(default_factory=_make_texts)
    """Environment variables of an allow-list that are set."""
    revision: str = ""
    """Commit of the git repository that contains the script; empty if there is none."""
    settings: Mapping[str, str] = field(default_factory=_make_texts)
    """Seeds and flags of determinism, such as `torch.deterministic_algorithms`."""
    models: tuple[ModelSummary, ...] = ()
    numbers: Mapping[str, str] = field(default_factory=_make_texts)
    """Numbers by name: `learning_rate.0`, and those that the script noted, as Python writes a
    float.
    """
    digests: Mapping[str, str] = field(default_factory=_make_texts)
    """Digests by name: `batch.0` of a tensor of the batch by its slot, `random.cpu` of the state of
    a generator.
    """
    parameters: Mapping[str, str] = field(default_factory=_make_texts)
    """For each parameter, by its logical name: element type, digest, and the rank's part of it if
    the rank does not have all of it.
    """


def format_card(card: RunCard) -> bytes:
    """Return a card as it is sent: JSON of at most MAX_CARD_BYTES; empty if the card is too large.

    A card that is too large is tried again without digests of parameters.
    """
    for each in (card, replace(card, parameters={})):
        body = {"version": CARD_VERSION, **make_plain(each)}
        filled = {name: value for name, value in body.items() if value}
        data = json.dumps(filled, separators=(",", ":"), default=make_plain).encode()
        if len(data) <= MAX_CARD_BYTES:
            return data
    return b""


def parse_card(body: object) -> RunCard:
    """Return the card in a JSON value or in its text; CorruptedError if it is not a card."""
    try:
        if isinstance(body, (bytes, str)):
            body = json.loads(body)
        if not isinstance(body, dict):
            raise ValueError(f"it is {body!r:.60}, not an object")
        values = dict(cast("dict[str, Any]", body))
        version = values.pop("version", None)
        if type(version) is not int or version != CARD_VERSION:
            raise ValueError(f"version is {version!r:.60}, not {CARD_VERSION}")
        card = read_json(RunCard, values, defaults=True, unknown=True, minimum=0)
        for text in card.parameters.values():
            parse_parameter(text)
    except _MAX_DEPTH_ERRORS as error:
        raise CorruptedError(f"run card cannot be read: {error}") from None
    return card


class ParameterDigest(NamedTuple):
    """Digest of a parameter on one rank."""

    dtype: str
    digest: int
    part: str = ""
    """Part of the parameter on this rank, such as `0:2/4,0:8/8` for the rows 0 and 1 of a tensor of
    shape (4, 8); empty for all elements.
    """


def format_parameter(found: ParameterDigest) -> str:
    """Return the text of a parameter's digest.

    >>> format_parameter(ParameterDigest("float32", 255, "0:2/4"))
    'float32 00000000000000ff 0:2/4'
    """
    return f"{found.dtype} {found.digest:0{_DIGEST_DIGITS}x} {found.part}".rstrip()


def parse_parameter(text: str) -> ParameterDigest:
    """Return the digest that a text describes; ValueError if it describes none."""
    dtype, digest, *part = text.split(" ")
    if len(digest) != _DIGEST_DIGITS or len(part) > 1:
        raise ValueError(f"digest of a parameter is {text!r:.60}")
    return ParameterDigest(dtype, int(digest, 16), part[0] if part else "")
