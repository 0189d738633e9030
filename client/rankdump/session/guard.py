"""Keeps our own failures out of a training script."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from rankdump.contract.errors import ExhaustedError

logger = logging.getLogger("rankdump")

_P = ParamSpec("_P")


def never_raises(method: Callable[_P, None]) -> Callable[_P, None]:
    """Log what goes wrong inside; only a strict plan's loss passes."""

    @wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except ExhaustedError:
            raise
        except Exception:
            logger.exception("rankdump: internal error in %s", method.__name__)

    return guarded
