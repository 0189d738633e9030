"""What observes the models of one session, told of its iterations together."""

from __future__ import annotations

from rankdump.values import IterationHook


class Hooks:
    """Hooks in the order in which their models came."""

    def __init__(self) -> None:
        self._hooks: list[IterationHook] = []

    def add(self, hook: IterationHook, iteration: int, armed: bool) -> None:
        """Tell one more, from the iteration on that runs now."""
        self._hooks.append(hook)
        hook.iteration_begins(iteration, armed)

    def begin(self, iteration: int, armed: bool) -> None:
        """Say that an iteration begins, or that it is dumped from now on, or no longer."""
        for hook in self._hooks:
            hook.iteration_begins(iteration, armed)

    def end(self, iteration: int, armed: bool) -> None:
        """Say that an iteration is over."""
        for hook in self._hooks:
            hook.iteration_ends(iteration, armed)

    def detach(self) -> None:
        """Leave the job as it was before."""
        for hook in self._hooks:
            hook.detach()
