"""How near each process group comes to its timeout, and what to set before it strikes. Pure.

`observed` takes what an iteration came to, `hints_of` judges it, `waiting` judges what is open
now, `warnings` says it to the ranks.
"""

from rankdumpd.coordinator.hints.assess import hints_of
from rankdumpd.coordinator.hints.live import waiting
from rankdumpd.coordinator.hints.state import HintState, observed
from rankdumpd.coordinator.hints.warning import warnings

__all__ = ["HintState", "hints_of", "observed", "waiting", "warnings"]
