"""Run card of the running iteration: collects what adapters and scripts report, adds facts about
the process, and hands on to the black box what that keeps too. Called on the training thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rankdump._core.recorder_protocol import CauseRecorder
from rankdump._core.run_card import (
    LEARNING_RATE_PREFIX,
    ModelSummary,
    ParameterDigest,
    RunCard,
    format_card,
    format_parameter,
)
from rankdump._core.tensor_layout import TensorLayout
from rankdump._recorder.declared_layouts import DeclaredLayouts
from rankdump._recorder.process_facts import (
    find_cann_version,
    find_revision,
    find_script_folder,
    read_command,
    read_random_states,
    read_variables,
    read_versions,
)

_MAX_DIGESTS = 64
_MAX_NUMBERS = 64
_MAX_PARAMETERS = 4096
_MAX_NAME_CHARACTERS = 512
_MAX_OPTIMIZERS = 8
"""Of a step; one that steps within the backward pass has an optimizer for each parameter."""


class OptimizerRates:
    """Names of learning rates: the optimizers of a step are numbered as they step first in it."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def begin_step(self) -> None:
        """Begin a step."""
        self._numbers = {}

    def name_rates(self, optimizer: object, rates: Sequence[float]) -> dict[str, float]:
        """Return the rates of the groups of an optimizer by their names.

        Those of the first one are `learning_rate.0` and `learning_rate.1`, as they were before
        optimizers had numbers, those of the second one `learning_rate.1.0` and so on.
        """
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        if number >= _MAX_OPTIMIZERS:
            return {}
        prefix = f"{LEARNING_RATE_PREFIX}{number}." if number else LEARNING_RATE_PREFIX
        return {f"{prefix}{group}": rate for group, rate in enumerate(rates)}


class RunCardRecorder:
    """The run card of one rank."""

    def __init__(
        self,
        layouts: DeclaredLayouts,
        black_box: CauseRecorder | None,
        *,
        warn: Callable[[str], None],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`warn` logs a text once; `environ` is by default the process's own."""
        self._layouts, self._black_box, self._warn = layouts, black_box, warn
        self._environ = os.environ if environ is None else environ
        self._facts: RunCard | None = None
        """What is the same in all iterations."""
        self.has_black_box = black_box is not None
        """Whether batch, generators and learning rates come from the hooks of a black box."""
        self._names: dict[int, str] = {}
        """Of the models."""
        self._models: dict[int, ModelSummary] = {}
        self._settings: dict[str, str] = {}
        self._numbers: dict[str, str] = {}
        self._rates = OptimizerRates()
        self._digests: dict[str, str] = {}
        self._parameters: dict[str, str] = {}

    def begin_step(self) -> None:
        """Begin the card of an iteration."""
        self._numbers, self._digests, self._parameters = {}, {}, {}
        self._rates.begin_step()

    def add_digest(self, name: str, digest: str) -> None:
        """Keep the digest of something that the step was computed from."""
        if len(self._digests) < _MAX_DIGESTS:
            self._digests[name] = digest
        if self._black_box is not None:
            self._black_box.add_digest(name, digest)

    def note(self, numbers: Mapping[str, float]) -> None:
        """Keep numbers of the step, such as its loss."""
        for name, number in numbers.items():
            if len(self._numbers) < _MAX_NUMBERS:
                self._numbers[name[:_MAX_NAME_CHARACTERS]] = repr(float(number))
        if self._black_box is not None:
            self._black_box.note(numbers)

    def add_rates(self, optimizer: object, rates: Sequence[float]) -> None:
        """Keep the learning rates of the groups of an optimizer that is about to step."""
        self.note(self._rates.name_rates(optimizer, rates))

    def add_random_states(self) -> None:
        """Keep the digests of the generators of Python and numpy."""
        self._digests.update(read_random_states())

    def use_settings(self, settings: Mapping[str, str]) -> None:
        """Keep seeds and flags of determinism of a framework."""
        self._settings.update(settings)

    def add_model(self, graph: int, summary: ModelSummary) -> None:
        """Keep the summary of an attached model; it replaces an earlier one of that number."""
        self._models[graph] = replace(summary, name=self._names.get(graph, ""))

    def name_model(self, graph: int, name: str) -> None:
        """Keep the name of an attached model."""
        self._names[graph] = name

    def add_parameters(self, graph: int, digests: Mapping[str, ParameterDigest]) -> None:
        """Keep digests of parameters of a model before the step, by their logical names; those of
        a second model have its name in front.
        """
        prefix = f"{self._names.get(graph, '')}:" if graph else ""
        for name, found in digests.items():
            if len(self._parameters) < _MAX_PARAMETERS:
                key = f"{prefix}{name}"[:_MAX_NAME_CHARACTERS]
                self._parameters[key] = format_parameter(found)

    def find_layout(self, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout that the script declared for a parameter, if it fits that shape."""
        return self._layouts.find_layout(name, shape) if self._layouts.declarations else None

    def make_card(self) -> bytes:
        """Return the card of the running iteration as it is sent; empty after an error, which is
        logged: the end of the iteration must be sent all the same.
        """
        try:
            if self._facts is None:
                self._facts = self._read_facts()
            card = replace(
                self._facts,
                # More modules may have been loaded since.
                versions={**read_versions(), **self._facts.versions},
                settings=self._settings,
                models=tuple(self._models[graph] for graph in sorted(self._models)),
                numbers=self._numbers,
                digests=self._digests,
                parameters=self._parameters,
            )
            data = format_card(card)
        except Exception as error:
            self._warn(f"the run card of an iteration is left out: {error!r:.200}")
            return b""
        if not data:
            self._warn("the run card of an iteration is left out: it is too large")
        return data

    def _read_facts(self) -> RunCard:
        cann = find_cann_version(self._environ)
        return RunCard(
            command=read_command(),
            versions={"cann": cann} if cann else {},
            environment=read_variables(self._environ),
            revision=find_revision(find_script_folder()),
        )
