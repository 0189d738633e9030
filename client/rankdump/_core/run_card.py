"""Run card of one rank and iteration: what the iteration was computed from, before its first
operator. Pure.

It is the value `card` of the manifest. Digests are hexadecimal: xxh3-64 for the batch and the
states of generators, the first word of a fingerprint for parameters, which adds up over shards
(`_core/tensor_fingerprint.py`). No text of it may be a secret: `_core/secret_mask.py`.
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
"""A larger card is not sent, and not accepted."""
LEARNING_RATE_PREFIX = "learning_rate."
BATCH_PREFIX = "batch."
RANDOM_PREFIX = "random."
LOCAL_VARIABLES = frozenset(
    ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
)
"""Variables of the environment that may differ from rank to rank."""
_MAX_DEPTH_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_DIGEST_DIGITS = 16


def _make_texts() -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Summary of the parameters of one attached model, by their logical shapes."""

    name: str
    parameters: int
    elements: int
    digest: str
    """xxh3-64 of names and shapes."""
    dtypes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of parameters by element type."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """The card of one iteration of one rank."""

    command: tuple[str, ...] = ()
    """Arguments of the process, secrets masked."""
    versions: Mapping[str, str] = field(default_factory=_make_texts)
    environment: Mapping[str, str] = field(default_factory=_make_texts)
    """Variables of an allow-list that are set."""
    revision: str = ""
    """Commit of the git repository of the script; empty when it is in none."""
    settings: Mapping[str, str] = field(default_factory=_make_texts)
    """Seeds and flags of determinism, such as `torch.deterministic_algorithms`."""
    models: tuple[ModelSummary, ...] = ()
    numbers: Mapping[str, str] = field(default_factory=_make_texts)
    """`learning_rate.0`, and what the script noted, as Python writes a float."""
    digests: Mapping[str, str] = field(default_factory=_make_texts)
    """`batch.0`: a tensor of the batch by its slot; `random.cpu`: the state of a generator."""
    parameters: Mapping[str, str] = field(default_factory=_make_texts)
    """By logical name: element type, digest, and the part of a rank that has not all of it."""


def format_card(card: RunCard) -> bytes:
    """Return a card as it is sent: JSON of at most MAX_CARD_BYTES; empty for a larger one.

    One that is too large is tried again without digests of parameters.
    """
    for each in (card, replace(card, parameters={})):
        body = {"version": CARD_VERSION, **make_plain(each)}
        filled = {name: value for name, value in body.items() if value}
        data = json.dumps(filled, separators=(",", ":"), default=make_plain).encode()
        if len(data) <= MAX_CARD_BYTES:
            return data
    return b""


def parse_card(body: object) -> RunCard:
    """Return the card that a value of JSON, or its text, describes; CorruptedError for no card."""
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
    """`0:2/4,0:8/8` for the rows 0 and 1 of a tensor of shape (4, 8); empty for all elements."""


def format_parameter(found: ParameterDigest) -> str:
    """Return the text of a digest.

    >>> format_parameter(ParameterDigest("float32", 255, "0:2/4"))
    'float32 00000000000000ff 0:2/4'
    """
    return f"{found.dtype} {found.digest:0{_DIGEST_DIGITS}x} {found.part}".rstrip()


def parse_parameter(text: str) -> ParameterDigest:
    """Return the digest that a text describes; ValueError for another text."""
    dtype, digest, *part = text.split(" ")
    if len(digest) != _DIGEST_DIGITS or len(part) > 1:
        raise ValueError(f"digest of a parameter is {text!r:.60}")
    return ParameterDigest(dtype, int(digest, 16), part[0] if part else "")
