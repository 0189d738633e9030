"""Noise run that the environment asks for: the inputs of attached models are moved by one unit in
the last place. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

PERTURB_VARIABLE = "RANKDUMP_PERTURB"
"""Asks for a noise run; `rankdump run --perturb` sets it."""
PERTURB_SETTING = "rankdump.perturb"
"""Setting of a run card that names what was moved, `1ulp: batch.0`."""
ONE_ULP = "1ulp"
PERTURBATIONS = (ONE_ULP,)
"""Allowed values of the variable; unset or empty for a run as it is."""
PERTURB_WARNING = (
    f"this is a noise run: the first floating input of each call of an attached model is moved by "
    f"one unit in its last place ({ONE_ULP}), which changes the results of the training"
)


def read_perturbation(environ: Mapping[str, str]) -> str:
    """Return the noise that the environment asks for; empty for none, or for an unknown one."""
    asked = environ.get(PERTURB_VARIABLE, "")
    return asked if asked in PERTURBATIONS else ""


def find_perturbation_fault(environ: Mapping[str, str]) -> str:
    """Return what is wrong with the value of the variable, one sentence; empty for nothing."""
    asked = environ.get(PERTURB_VARIABLE, "")
    if not asked or asked in PERTURBATIONS:
        return ""
    return f"{PERTURB_VARIABLE}={asked!r:.60} is not allowed; allowed: {', '.join(PERTURBATIONS)}"
