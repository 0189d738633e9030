"""Attachment to a loop with Hugging Face accelerate, after `prepare`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rankdump.integrations.accelerate.attach(accelerator, model)

An iteration is one step of the optimizer, also where several batches are accumulated: each
`with accelerator.accumulate(model)` is a micro-batch. Without `accumulate`, a micro-batch ends with
`accelerator.backward`.
"""

from __future__ import annotations

from typing import Any

from rankdump._session import Session
from rankdump.integrations._loop_session import check_models, check_owner, notify_around, shield
from rankdump.integrations._watched_loop import WatchedLoop

__all__ = ["attach"]

_MEMBERS = (
    *("accumulate", "backward", "end_training"),
    *("gradient_accumulation_steps", "sync_gradients"),
)


def attach(
    accelerator: Any, *models: Any, session: Session | None = None, first_step: int = 0
) -> Session:
    """Observe prepared models, and count the steps of their optimizers from now on.

    The session is by default that of the environment, which `accelerator.end_training` closes; a
    session that is given stays open. `first_step` is the number of the first step, such as after a
    resume. TypeError if an object is not an Accelerator, or if a model cannot be observed.
    """
    caller = f"{__name__}.attach"
    check_owner(caller, accelerator, _MEMBERS, "an accelerate.Accelerator")
    check_models(caller, models)
    accumulates = accelerator.gradient_accumulation_steps > 1
    loop = WatchedLoop(__name__, session, first_step=first_step, accumulates=accumulates)
    loop.begin(models, models)
    if loop.session.active:

        @shield
        def begin_entry() -> None:
            # Until `accumulate` is entered, the flag is that of the previous micro-batch.
            loop.begin_entry(ends_step=accelerator.sync_gradients)

        notify_around(accelerator, "accumulate", before=begin_entry)
        notify_around(accelerator, "backward", after=loop.end_backward)
        notify_around(accelerator, "end_training", before=loop.end)
    return loop.session
