"""Attachment to a loop with Lightning Fabric, after `setup`.

    model, optimizer = fabric.setup(model, optimizer)
    rankdump.integrations.fabric.attach(fabric, model)

An iteration is one step of the optimizer; a micro-batch ends with `fabric.backward`.
"""

from __future__ import annotations

from typing import Any

from rankdump._session import Session
from rankdump.integrations._loop_session import check_models, check_owner, notify_around
from rankdump.integrations._watched_loop import WatchedLoop

__all__ = ["attach"]


def attach(
    fabric: Any, *models: Any, session: Session | None = None, first_step: int = 0
) -> Session:
    """Observe models that `fabric.setup` returned, and count the steps of their optimizers.

    The session is by default that of the environment; close it to end the last step before the
    script ends. `first_step` is the number of the first step, such as after a resume. TypeError if
    an object is not a Fabric, or if a model cannot be observed.
    """
    caller = f"{__name__}.attach"
    check_owner(caller, fabric, ("backward", "setup"), "a lightning.Fabric")
    check_models(caller, models)
    # The models inside Fabric's wrappers are observed, because the wrapper would be part of the
    # name of every operator.
    observed = [getattr(model, "module", model) for model in models]
    loop = WatchedLoop(__name__, session, first_step=first_step, accumulates=True)
    loop.begin(observed, models)
    if loop.session.active:
        notify_around(fabric, "backward", after=loop.end_backward)
    return loop.session
