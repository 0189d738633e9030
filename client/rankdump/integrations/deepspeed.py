"""Attachment to an engine of DeepSpeed.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    rankdump.integrations.deepspeed.attach(engine)

An iteration is one step of the optimizer and has the number `engine.global_steps`; the forward
passes of a step are micro-batches, numbered by `engine.micro_steps` if several are accumulated. An
evaluation belongs to the step before it.
"""

from __future__ import annotations

from typing import Any

from rankdump._session import Session
from rankdump._session.framework_adapters import make_outermost_watch
from rankdump.integrations._loop_session import LoopSession, check_models, check_owner, shield

__all__ = ["attach"]

_MEMBERS = (
    "global_steps",
    "micro_steps",
    "gradient_accumulation_steps",
    "module",
    "zero_optimization_stage",
)


class EngineLoop:
    """Steps and micro-batches of one engine, as the engine's own counters number them."""

    def __init__(self, engine: Any, loop: LoopSession) -> None:
        self._engine = engine
        self._loop = loop
        self._step = -1
        self._first_micro_step = 0
        self._microbatch = 0

    @shield
    def watch(self) -> None:
        """Determine steps from calls of the model, from now on."""
        model = self._engine.module
        outermost = make_outermost_watch(model, self.begin_forward)
        if outermost is not None:
            outermost.watch(model)

    @shield
    def begin_forward(self, number: int = 0) -> None:
        """Begin a step or a micro-batch, at its first forward pass that trains."""
        engine = self._engine
        if not engine.module.training:
            return
        if engine.global_steps != self._step:
            self._step, self._first_micro_step = engine.global_steps, engine.micro_steps
            self._microbatch = 0
            accumulates = engine.gradient_accumulation_steps() > 1
            self._loop.begin_step(self._step, (), accumulates=accumulates)
        elif engine.micro_steps - self._first_micro_step != self._microbatch:
            self._microbatch = engine.micro_steps - self._first_micro_step
            self._loop.begin_microbatch(self._microbatch)


def attach(engine: Any, *, session: Session | None = None) -> Session:
    """Observe the model of an engine, and begin an iteration at each step of its optimizer.

    The session is by default that of the environment; close it to end the last step before the
    script ends. TypeError if the object is not an engine.
    """
    caller = f"{__name__}.attach"
    check_owner(caller, engine, _MEMBERS, "the engine that deepspeed.initialize returns")
    check_models(caller, (engine.module,))
    loop = LoopSession(__name__, session)
    loop.open((engine.module,))
    if loop.session.active:
        EngineLoop(engine, loop).watch()
        _warn_about_zero(engine, loop)
    return loop.session


@shield
def _warn_about_zero(engine: Any, loop: LoopSession) -> None:
    """Warn which tensors of an engine with ZeRO are missing in the dump."""
    stage = engine.zero_optimization_stage()
    if stage:
        loop.warn_once(
            f"records no gradients of parameters: ZeRO stage {stage} moves them into DeepSpeed's "
            "optimizer; gradients between operators are recorded"
        )
