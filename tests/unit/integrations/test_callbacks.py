"""Callbacks for trainers, with stand-ins for their frameworks: `make test-frameworks` has these."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from .conftest import SessionJournal

MODEL = SimpleNamespace()
PACKAGES = {
    "transformers": {"transformers": "TrainerCallback"},
    "lightning": {"lightning.pytorch": "Callback"},
}


@pytest.fixture
def import_integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import an integration with packages that have one class each, or without any package."""
    imported: list[str] = []

    def import_with(name: str, packages: dict[str, str]) -> ModuleType:
        for absent in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
            monkeypatch.setitem(sys.modules, absent, None)
        for package, kind in packages.items():
            for path in (package.partition(".")[0], package):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            setattr(sys.modules[package], kind, type(kind, (), {}))
        full = f"rankdump.integrations.{name}"
        sys.modules.pop(full, None)
        imported.append(full)
        return importlib.import_module(full)

    yield import_with
    for full in imported:
        sys.modules.pop(full, None)


def run_hf_trainer(callback: Any, *, steps: int, accumulated: int) -> None:
    """Call a callback as the Trainer of transformers does."""
    args, state = SimpleNamespace(gradient_accumulation_steps=accumulated), SimpleNamespace()
    for state.global_step in range(steps):
        callback.on_step_begin(args, state, None, model=MODEL, optimizer=None)
        for _ in range(accumulated - 1):
            callback.on_substep_end(args, state, None, model=MODEL)
    callback.on_train_end(args, state, None, model=MODEL)


def run_lightning(callback: Any, batches: list[int], *, accumulated: int | None = None) -> None:
    """Call a callback as Lightning's Trainer does, with so many batches for each step.

    `accumulated` is what the Trainer was told to accumulate, by default the most of them.
    """
    trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=accumulated or max(batches))
    for count in batches:
        for number in range(count):
            callback.on_train_batch_start(trainer, MODEL, None, number)
        trainer.global_step += 1
    callback.on_train_end(trainer, MODEL)


def test_trainer_callback_begins_steps_and_micro_batches(
    import_integration: Any, session: SessionJournal
) -> None:
    module = import_integration("transformers", PACKAGES["transformers"])
    run_hf_trainer(module.TrainerDumpCallback(session), steps=2, accumulated=3)
    micro = ["micro 0", "micro 1", "micro 2"]
    assert session.calls == [0, *micro, 1, *micro]
    assert session.attached == [MODEL]


def test_trainer_callback_numbers_no_micro_batches_without_accumulation(
    import_integration: Any, session: SessionJournal
) -> None:
    module = import_integration("transformers", PACKAGES["transformers"])
    run_hf_trainer(module.TrainerDumpCallback(session), steps=3, accumulated=1)
    assert session.calls == [0, 1, 2]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_callback_begins_steps_and_micro_batches(
    import_integration: Any, session: SessionJournal, package: str
) -> None:
    """The last step of an epoch may have fewer batches."""
    module = import_integration("lightning", {package: "Callback"})
    run_lightning(module.LightningDumpCallback(session), [2, 1, 2])
    assert session.calls == [0, "micro 0", "micro 1", 1, "micro 0", 2, "micro 0", "micro 1"]
    assert session.attached == [MODEL]


def test_lightning_callback_counts_batches_without_accumulation(
    import_integration: Any, session: SessionJournal
) -> None:
    module = import_integration("lightning", PACKAGES["lightning"])
    run_lightning(module.LightningDumpCallback(session), [1, 1])
    assert session.calls == [0, 1]


def test_lightning_callback_numbers_micro_batches_of_manual_optimization(
    import_integration: Any, session: SessionJournal
) -> None:
    """The Trainer does not know them; the second batch of the first step tells."""
    module = import_integration("lightning", PACKAGES["lightning"])
    run_lightning(module.LightningDumpCallback(session), [2, 2, 1], accumulated=1)
    assert session.calls == [0, "micro 1", 1, "micro 0", "micro 1", 2, "micro 0"]


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_absent_framework_is_named_with_how_to_install_it(
    import_integration: Any, name: str
) -> None:
    with pytest.raises(ImportError) as caught:
        import_integration(name, {})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"rankdump.integrations.{name}: ")
    assert line.endswith(f"pip install {name}")


def test_error_in_a_callback_does_not_reach_the_trainer(
    import_integration: Any, failing_session: SessionJournal
) -> None:
    module = import_integration("transformers", PACKAGES["transformers"])
    run_hf_trainer(module.TrainerDumpCallback(failing_session), steps=2, accumulated=2)
    callback = module.TrainerDumpCallback(failing_session)
    assert callback.on_step_begin(None, None, None) is None  # neither arguments nor state
