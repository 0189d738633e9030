"""Masks for what looks like a secret in the command line and in the environment: values of options
with such a name, and texts in the form of known tokens. Pure.

A mask too many costs a difference that is not seen; one too few publishes a password. So names are
matched generously, except where the value is a plain number or the name says that it counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"
_SECRET_NAME = re.compile(
    r"passw|passphrase|pwd|secret|token(?!i[sz])|api[-_]?key|access[-_]?key|private[-_]?key"
    r"|account[-_]?key|credential|auth(?!ors?(?![a-z]))|bearer|signature|cookie|dsn|webhook",
    re.I,
)
_PASSWORD_NAME = re.compile(r"passw|passphrase|pwd|secret|pin$", re.I)
"""Names whose value is masked even where it is a number."""
_PLAIN_VALUE = re.compile(r"[-+]?[0-9][0-9_.,]*(?:e[-+]?[0-9]+)?|true|false|yes|no|none|null", re.I)
_OPTION = re.compile(r"(?P<name>-{0,2}[^\s=:]{1,200})(?P<join>=|:\s*)(?P<value>.*)", re.S)
_TOKEN_FORMS = re.compile(
    r"\b(?:hf|ghp|gho|ghu|ghs|ghr|glpat|sk|pk|rk|xox[abposr]|npm|pypi|dop_v1|wandb|nvapi|AKIA|ASIA"
    r"|github_pat)(?:[-_][A-Za-z0-9_-]{12,}|(?<=A)[A-Z0-9]{16})"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"
    r"|\bAIza[A-Za-z0-9_-]{30,}"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL_SECRET = re.compile(r"(?<=[?&])([^=&#\s]{1,100})=([^&#\s]+)")
_RANDOM_TEXT = re.compile(
    r"(?<![A-Za-z0-9+/_-])(?=[A-Za-z0-9+/_-]*[a-z])(?=[A-Za-z0-9+/_-]*[A-Z])"
    r"(?=[A-Za-z0-9+/_-]*[0-9])[A-Za-z0-9+_-]{32,}={0,2}(?![A-Za-z0-9+/_.-])"
)
"""Long texts of both cases and digits that are no paths: keys that no name announces."""


def mask_value(text: str) -> str:
    """Return a text with all parts masked that have the form of a secret.

    >>> mask_value("https://me:pass@host/x?sig=abc&page=2")
    'https://***@host/x?sig=abc&page=2'
    """
    text = _URL_LOGIN.sub(MASK, text)
    text = _URL_SECRET.sub(
        lambda found: f"{found[1]}={MASK}" if _SECRET_NAME.search(found[1]) else found[0], text
    )
    return _RANDOM_TEXT.sub(MASK, _TOKEN_FORMS.sub(MASK, text))


def mask_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a command with secrets masked.

    >>> mask_arguments(["train.py", "--api-key", "abc", "hub.token=xyz", "--max-tokens=512"])
    ('train.py', '--api-key', '***', 'hub.token=***', '--max-tokens=512')
    """
    masked: list[str] = []
    name = ""
    for argument in arguments:
        if name and not argument.startswith("-"):
            masked.append(_mask_named(name, argument))
            name = ""
            continue
        name = ""
        option = _OPTION.fullmatch(argument)
        if option is not None and not argument.startswith(("/", "http")):
            value = _mask_named(option["name"], option["value"])
            masked.append(option["name"] + option["join"] + value)
            continue
        if argument.startswith("-") and _SECRET_NAME.search(argument):
            name = argument
        masked.append(mask_value(argument))
    return tuple(masked)


def _mask_named(name: str, value: str) -> str:
    is_secret = bool(_SECRET_NAME.search(name))
    if is_secret and _PLAIN_VALUE.fullmatch(value):
        is_secret = bool(_PASSWORD_NAME.search(name))
    return MASK if is_secret and value else mask_value(value)
