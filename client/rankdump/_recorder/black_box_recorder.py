"""The black box of a rank: collects the pulses of the running step, sends each step to the agent,
keeps the cost within the allowed share of a step, and reports faults.

Adapters measure tensors and call `add_pulse` on the training thread. A freeze that the agent asks
for is answered on the thread of the connection, so a rank whose training hangs answers too.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from rankdump._core.black_box import (
    MAX_STEP_DETAILS,
    MAX_STEP_NOTES,
    MAX_STEP_ROWS,
    PULSE_ROW,
    FaultKind,
    FaultNotice,
    FreezeNotice,
    StepCause,
    StepState,
    pack_detail,
    pack_row,
)
from rankdump._core.bounded_cache import remember
from rankdump._core.plan import BlackBoxSettings, OperatorSelection, describe_rule
from rankdump._core.record import TensorKind
from rankdump._core.recorder_protocol import CallLister, LateRow, TensorSource, TurnSpending
from rankdump._kernels.kernel_functions import FoundMoments
from rankdump._recorder.event_trace import now_us
from rankdump._recorder.kept_tensors import KeptTensors, copy_tensor
from rankdump._recorder.pulse_decisions import (
    HISTORY_STEPS,
    MAX_STEPS_PER_TENSOR,
    MAX_STRIDE,
    MAX_WATCHED_TENSORS,
    RuleMatch,
    RuleWatch,
    TurnCredit,
    choose_part,
    choose_stride,
    has_jumped,
)
from rankdump._recorder.run_card_recorder import OptimizerRates
from rankdump._transport.step_outbox import StepOutbox
from rankdump._wire.black_box_messages import MAX_KINDS
from rankdump._wire.session_messages import kind_to_wire

_JUDGED_STEPS = 8
"""Number of steps whose cost is measured before the stride is judged again."""
_CALL_NS = 1500
"""Nanoseconds that torch takes to call a hook, in addition to the time that the hook measures
itself.
"""
_STEP_NS = 150_000
"""Nanoseconds of a step that no hook measures: calls between the parts of the session, and the
thread that sends the step (`python -m bench blackbox`, many small calls).
"""
_TURN_NS = 20_000
"""Nanoseconds to measure a tensor only for its fingerprint, because hooks are installed for it."""
PROGRESS_NS = 3_000_000_000
"""Nanoseconds after which a step that is still running is sent: less than the shortest silence that
the alarm `no_step` allows.
"""
_MAX_NOTED_NUMBERS = 64
_MAX_HISTORIES = 4096
UNMATCHED_STEPS = 16
"""Steps after which a watch rule that matches no tensor is logged, without waiting for the end of
the job: a job may run for weeks.
"""
MAX_LOGGED_NOTES = 64
"""Maximum number of notes of watch rules that a rank logs."""


class BlackBoxRecorder:
    """The black box of one rank."""

    def __init__(
        self,
        settings: BlackBoxSettings,
        outbox: StepOutbox,
        *,
        rank: int,
        warn: Callable[[str], None],
        dump: Callable[[OperatorSelection, int, int], int | str],
        clock_us: Callable[[], int] = now_us,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`warn` logs a text once. `dump` keeps tensors of operators for some iterations; it
        returns the first of these iterations, or why there is none.
        """
        self._dump = dump
        self._settings, self._outbox, self._rank, self._warn = settings, outbox, rank, warn
        self._clock_us, self._clock_ns = clock_us, clock_ns
        self._numbers: dict[TensorKind, int] = {}
        self._watch = RuleWatch(settings.watch)
        self._credit, self._rates = TurnCredit(settings.max_overhead), OptimizerRates()
        self._details: list[bytes] = []
        self._kept = KeptTensors(outbox)
        self._turns_ns = self._detail_ns = 0
        """Time of fingerprints and copies in the running step, without and with hook calls (ns)."""
        self._bad_in = -2
        """Last iteration in which a tensor was not finite."""
        self._dumps_until: dict[int, int] = {}
        """For each watch rule, the first iteration after those that it dumps."""
        self._logged: dict[tuple[int, TensorKind], str] = {}
        """Notes of watch rules that were logged, by rule and tensor."""
        self._notes: list[str] = []
        """Notes of watch rules in the running step."""
        self._is_running = self._in_child = False
        self._rows: list[bytes] = []
        self._noted: dict[str, float] = {}
        self._digests: dict[str, str] = {}
        self._iteration = self._ended_steps = 0
        self._started_us = self._begun_ns = 0
        self._spent_ns = self._skipped = 0
        self._progress_ns = self._progress_tensors = 0
        """When the running step was last sent, and how many tensors it had then."""
        self._gradient_squares = 0.0
        self._largest_gradient: tuple[float, TensorKind | None] = (0.0, None)
        self._found_in: dict[FaultKind | int, int] = {}
        """Last iteration in which a fault of each kind, or of each watch rule, was found."""
        self._is_over_budget = False
        """Whether the cost exceeds its share although the stride cannot be higher."""
        self._has_warned = False
        """Whether that excess was logged: its text differs each time, so `warn` would repeat it."""
        self._list_calls: CallLister | None = None
        self._last: StepState | None = None
        """The step that ended last."""
        self._shares: list[float] = []
        self._histories: dict[tuple[str, int], deque[float]] = {}
        self._tensor_count = 0
        """Number of tensors of the largest attached model."""
        self.stride = 1
        """Number of parts that the modules are divided into; each step measures one of them."""
        self.part = 0
        """Index of the part that is measured in the running step."""

    # -- calls of the session, on the training thread

    def begin_step(self, iteration: int) -> None:
        """Begin a step; do nothing if the step of this iteration is already running."""
        if self._in_child or (self._is_running and iteration == self._iteration):
            return
        self._is_running = True
        self._iteration, self._started_us = iteration, self._clock_us()
        self._begun_ns = self._progress_ns = self._clock_ns()
        self._progress_tensors = 0
        self._rows, self._noted, self._digests, self._notes = [], {}, {}, []
        self._details = []
        self._kept.begin_step()
        self._rates.begin_step()
        self._spent_ns = self._turns_ns = self._detail_ns = self._skipped = 0
        self._gradient_squares, self._largest_gradient = 0.0, (0.0, None)
        self.part = choose_part(iteration, self.stride, self._tensor_count)

    def end_step(self, *, ran: bool) -> None:
        """End the step: send it, and judge its norms and its cost. A step in which nothing ran is
        ignored.
        """
        if not self._is_running or not (ran or self._rows):
            return
        begun_ns = self._clock_ns()
        self._last = self._make_state(unfinished=False)
        self._outbox.add_state(self._last)
        self._kept.send_waiting()
        self._judge_gradients(self._gradient_squares, self._largest_gradient[1], self._iteration)
        loss = self._noted.get("loss")
        if loss is not None and self._judge_number("loss", 0, abs(loss)):
            self.report_fault(FaultKind.JUMP, f"the loss jumped to {loss:g}")
        now_ns = self._clock_ns()
        spent_ns = self._spent_ns + now_ns - begun_ns + _STEP_NS
        self._judge_cost(now_ns - self._begun_ns, spent_ns)
        self._is_running = False
        self._ended_steps += 1
        if self._ended_steps == UNMATCHED_STEPS:
            for text in self.list_unmatched_rules():
                self._warn(f"rank {self._rank}, in its first {UNMATCHED_STEPS} steps: {text}")

    def note(self, numbers: Mapping[str, float]) -> None:
        """Keep numbers of the step, such as its loss."""
        for name, number in numbers.items():
            if len(self._noted) < _MAX_NOTED_NUMBERS:
                self._noted[name] = number
            if not math.isfinite(number):
                self.report_fault(FaultKind.NON_FINITE, f"{name} is {number:g}")

    def add_rates(self, optimizer: object, rates: Sequence[float]) -> None:
        """Keep the learning rates of the groups of an optimizer that is about to step."""
        self.note(self._rates.name_rates(optimizer, rates))

    def close(self, *, raised: bool) -> None:
        """Send the running step if an error ends the session during it."""
        self._outbox.finish()
        if raised:
            if self._is_running:
                self._outbox.add_state(self._make_state(unfinished=True))
                self._kept.send_waiting()
            error = sys.exc_info()[1] or getattr(sys, "last_value", None)
            what = "an error" if error is None else f"{type(error).__name__}: {error}"
            self.report_fault(FaultKind.EXCEPTION, f"the job raised {what}"[:1000])

    # -- calls of adapters, on the training thread

    def note_tensor_count(self, tensor_count: int) -> None:
        """Note the number of tensors of a model: the stride stays so low that at least one of
        `MAX_STEPS_PER_TENSOR` steps measures a tensor.
        """
        self._tensor_count = max(self._tensor_count, tensor_count)

    def use_call_lister(self, list_calls: CallLister) -> None:
        """Add to each step how far this rank has come in the collectives of its groups."""
        self._list_calls = list_calls

    def number_kind(self, kind: TensorKind) -> int:
        """Return the number of a kind; -1 if there are too many kinds."""
        number = self._numbers.get(kind)
        if number is None:
            if self._in_child:
                return -1
            if len(self._numbers) >= MAX_KINDS:
                self._warn("the black box has seen too many kinds of tensors, and skips new ones")
                return -1
            number = self._numbers[kind] = self._outbox.add_kind(kind_to_wire(kind))
            self._watch.add_tensor(number, kind)
            if self._watch.is_full:
                self._warn(
                    f"rankdump.blackbox.watch: the rules hold for {MAX_WATCHED_TENSORS} tensors; "
                    "further ones are not watched"
                )
        return number

    def is_watched(self, op_type: str, op_name: str) -> bool:
        """Return whether a watch rule names an operator."""
        return self._watch.names_operator(op_type, op_name)

    def add_pulse(
        self, number: int, moments: FoundMoments, find_source: Callable[[], str] = str
    ) -> bool:
        """Add the pulse of a tensor, whose kind has this number; return whether all elements are
        finite.

        `find_source` returns the line of the script that is running.
        """
        if number < 0 or len(self._rows) >= MAX_STEP_ROWS:
            self._skipped += 1
            return True
        self._rows.append(pack_row(number, moments))
        if number in self._watch.tensors:
            matches = self._watch.judge(number, self._iteration, moments)
            self._notes += [self._act_on(match, find_source) for match in matches]
        return not any(moments[5:8])

    def add_gradient(self, kind: TensorKind, number: int, moments: FoundMoments) -> bool:
        """Add the pulse of the gradient of a parameter."""
        squares = moments[4]
        self._gradient_squares += squares
        if squares > self._largest_gradient[0]:
            self._largest_gradient = squares, kind
        return self.add_pulse(number, moments)

    @property
    def keeps_tensors(self) -> bool:
        """Whether the plan and the agent allow tensors to be kept in full."""
        return not self._kept.is_off

    def can_afford(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies together may be made now."""
        copied = spending.copied_bytes, spending.copies
        has_room = not spending.copies or self._kept.has_room(*copied)
        return has_room and self._credit.can_afford(spending)

    def is_too_much(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies together take too long or too much memory
        for any step.
        """
        copied = spending.copied_bytes, spending.copies
        is_too_large = spending.copies > 0 and self._kept.exceeds_budget(*copied)
        return is_too_large or self._credit.is_too_much(spending)

    def add_detail(
        self, number: int, moments: FoundMoments, fingerprint: bytes, byte_count: int, spent_ns: int
    ) -> None:
        """Add the remaining statistics and the fingerprint of the tensor whose pulse was added
        last.
        """
        self._credit.spend_fingerprint(byte_count, spent_ns)
        self._count_turn(spent_ns)
        row = self._find_last_row(number)
        if row is not None and len(self._details) < MAX_STEP_DETAILS:
            self._details.append(pack_detail(row, moments, fingerprint))

    def keep_tensor(self, kind: TensorKind, number: int, source: TensorSource) -> None:
        """Keep in full the tensor whose pulse was added last and whose kind has this number; count
        it as left out if the budgets have no room.
        """
        if not self.can_afford(TurnSpending(copied_bytes=kind.byte_count, copies=1)):
            self._kept.count_left_out()
            return
        begun_ns, row = self._clock_ns(), self._find_last_row(number)
        self._kept.add(copy_tensor(self._iteration, kind, source, row, about_fault=False))
        spent_ns = self._clock_ns() - begun_ns
        self._credit.spend_copy(kind.byte_count, spent_ns)
        self._count_turn(spent_ns)

    def begin_fault(self) -> bool:
        """Note that a tensor is not finite; return whether neither this step nor the one before had
        such a tensor.
        """
        last, self._bad_in = self._bad_in, self._iteration
        return last < self._iteration - 1 or last > self._iteration

    def keep_fault(self, number: int, tensors: Sequence[tuple[TensorKind, TensorSource]]) -> None:
        """Keep tensors in full and send them at once: the tensor whose pulse was added last, whose
        kind has this number, and the inputs of its operator. Tensors that do not fit are counted.
        """
        # Tensors about a fault are sent after an unfinished state of their step, which must not
        # replace the finished state of a step that has ended.
        if self._kept.is_off or not self._is_running:
            return
        begun_ns, row = self._clock_ns(), self._find_last_row(number)
        # The agent keeps only tensors of steps that it knows. It gets the step now, so that the
        # tensors are kept even if the rank never ends it.
        self._outbox.add_state(self._make_state(unfinished=True))
        for kind, source in tensors:
            if self._kept.has_fault_room(kind.byte_count):
                own_row = row if self._numbers.get(kind) == number else None
                tensor = copy_tensor(self._iteration, kind, source, own_row, about_fault=True)
                self._kept.discard(own_row)
                self._kept.send_about_fault(tensor)
            else:
                self._kept.count_left_out()
        self._count_turn(self._clock_ns() - begun_ns)

    def count_left_out(self, count: int = 1) -> None:
        """Count tensors that were to be kept in full but are not; without effect if no tensors are
        kept.
        """
        self._kept.count_left_out(count)

    def _count_turn(self, spent_ns: int) -> None:
        # Counted apart from pulses: as time of pulses it would cause a warning and raise the
        # stride.
        self._turns_ns += spent_ns
        self._detail_ns += spent_ns + (_TURN_NS if self.stride > 1 else 0)

    def _find_last_row(self, number: int) -> int | None:
        """Return the index of the last row if it belongs to the kind with this number; None if the
        pulse got no row because the step had too many.
        """
        has_row = number >= 0 and self._rows and self._rows[-1][:4] == number.to_bytes(4, "little")
        return len(self._rows) - 1 if has_row else None

    def add_late_rows(self, iteration: int, rows: Sequence[LateRow]) -> None:
        """Add rows that were measured late to the step that ended last, and send that
        step again.
        """
        if self._last is None or self._last.iteration != iteration:
            return
        packed = [pack_row(row.number, row.moments) for row in rows if row.number >= 0]
        most = MAX_STEP_ROWS - len(self._last.rows) // PULSE_ROW.itemsize
        notes = [
            self._act_on(match, lambda row=row: row.source)
            for row in rows
            for match in self._watch.judge(row.number, iteration, row.moments)
        ]
        self._last = self._last._replace(
            rows=self._last.rows + b"".join(packed[:most]),
            notes=(*self._last.notes, *notes)[:MAX_STEP_NOTES],
        )
        self._outbox.add_state(self._last)
        gradients = [(row.moments[4], row.gradient) for row in rows if row.gradient is not None]
        if gradients:
            largest = max(gradients, key=lambda each: each[0])[1]
            self._judge_gradients(sum(s for s, _ in gradients), largest, iteration)

    def count_skipped(self, count: int = 1) -> None:
        """Count tensors that were not measured."""
        self._skipped += count

    def add_time(self, spent_ns: int, calls: int = 1) -> None:
        """Add the time that measuring took, and the number of calls of hooks that it
        took place in.
        """
        self._spent_ns += spent_ns + calls * _CALL_NS

    def add_digest(self, name: str, digest: str) -> None:
        """Keep the digest of an input of the step, such as its batch."""
        self._digests[name] = digest

    def report_fault(
        self,
        kind: FaultKind,
        text: str,
        tensor_kind: TensorKind | None = None,
        source: str = "",
        *,
        iteration: int | None = None,
    ) -> None:
        """Report a fault, so that the agent freezes the ring. A fault that the step before had too
        is not reported again.
        """
        found_in = self._iteration if iteration is None else iteration
        self._add_fault(kind, FaultNotice(kind, found_in, text, tensor_kind, source))

    @property
    def op_names(self) -> set[str]:
        """Names of the operators that were measured; called from any thread."""
        return {kind.op_name for kind in list(self._numbers)}

    def list_unmatched_rules(self) -> list[str]:
        """Return a sentence for each watch rule that matches no tensor; none if nothing was
        measured.
        """
        return self._watch.list_unmatched() if self._numbers else []

    def list_notes(self) -> list[str]:
        """Return the notes of watch rules in the session, the first for each rule and tensor."""
        return list(self._logged.values())

    def disarm(self) -> None:
        """Send nothing more, in a forked child; takes no lock, because another thread may have held
        it during the fork.
        """
        self._in_child, self._is_running = True, False

    # -- on the thread of the connection

    def report_progress(self) -> None:
        """Send the part of a long step that was measured so far, such as of a step with an
        evaluation in it, if more was measured since it was last sent.
        """
        iteration, tensors = self._iteration, len(self._rows) + self._skipped
        now_ns = self._clock_ns()
        is_due = now_ns - self._progress_ns >= PROGRESS_NS and tensors > self._progress_tensors
        if not (self._is_running and is_due):
            return
        state = self._make_state(unfinished=True)
        # The training thread may have begun the next step meanwhile.
        if self._is_running and self._iteration == state.iteration == iteration:
            self._progress_ns, self._progress_tensors = now_ns, tensors
            self._outbox.add_state(state)

    def answer_freeze(self, notice: FreezeNotice) -> None:
        """Send the part of the running step that was measured so far."""
        self._warn(notice.text)
        if self._is_running:
            stacks = format_stacks() if notice.wants_stacks else ()
            self._outbox.add_state(self._make_state(unfinished=True, stacks=stacks))

    def _make_state(self, *, unfinished: bool, stacks: Sequence[str] = ()) -> StepState:
        # Details are taken before rows, because a detail refers to a row: when this runs on the
        # thread of the connection, the training thread may add to both meanwhile.
        details = b"".join(list(self._details))
        return StepState(
            iteration=self._iteration,
            started_us=self._started_us,
            ended_us=self._clock_us(),
            rows=b"".join(list(self._rows)),
            cause=StepCause(dict(self._noted), dict(self._digests)),
            skipped=self._skipped,
            unfinished=unfinished,
            stacks=tuple(stacks),
            notes=tuple(self._notes[:MAX_STEP_NOTES]),
            calls=self._list_calls(members=unfinished) if self._list_calls else (),
            details=details,
            left_out=self._kept.left_out,
        )

    def _add_fault(self, about: FaultKind | int, notice: FaultNotice) -> bool:
        """Send a fault unless the step before had it too; return whether it was sent."""
        last, self._found_in[about] = self._found_in.get(about), notice.iteration
        is_new = not self._in_child and (last is None or last < notice.iteration - 1)
        if is_new:
            self._outbox.add_fault(notice)
        return is_new

    def _act_on(self, match: RuleMatch, find_source: Callable[[], str]) -> str:
        """Carry out the action of a watch rule; return the note for the step."""
        note = match.describe()
        if match.rule.do == "freeze":
            notice = FaultNotice(
                FaultKind.WATCH, match.iteration, match.text, match.kind, find_source()
            )
            self._add_fault(match.number, notice)
            return note
        if match.rule.do == "dump":
            self._dump_for(match)
        key = match.number, match.kind
        if key not in self._logged and len(self._logged) < MAX_LOGGED_NOTES:
            self._logged[key] = f"iteration {match.iteration}: {note}"
            self._warn(f"rank {self._rank}, {self._logged[key]}")
            if len(self._logged) == MAX_LOGGED_NOTES:
                self._warn("further notes of rankdump.blackbox.watch are not logged")
        return note

    def _dump_for(self, match: RuleMatch) -> None:
        """Keep the tensors of the next iterations, unless the same rule has already
        requested them.
        """
        if self._in_child or match.iteration + 1 < self._dumps_until.get(match.number, 0):
            return
        operators, count = self._watch.select_operators(match.number), match.rule.iterations
        begin = self._dump(operators, match.iteration + 1, count)
        if isinstance(begin, str):
            name = describe_rule(match.rule, match.number)
            self._warn(f"rank {self._rank}: {name} dumps nothing: {begin}")
        else:
            self._dumps_until[match.number] = begin + count

    def _judge_gradients(self, squares: float, largest: TensorKind | None, iteration: int) -> None:
        """Report a norm of the gradients that is far above the norms of earlier steps."""
        if largest is None:
            return
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        # Norms are compared only between steps that measure the same part of the modules.
        part = choose_part(iteration, self.stride, self._tensor_count)
        if self._judge_number(f"gradients of {self.stride}", part, norm):
            text = f"the norm of the gradients jumped to {norm:g}"
            self.report_fault(FaultKind.JUMP, text, largest, iteration=iteration)

    def _judge_number(self, name: str, part: int, number: float) -> bool:
        key = name, part
        history = self._histories.get(key)
        if history is None:
            history = deque[float](maxlen=HISTORY_STEPS)
            remember(self._histories, key, history, _MAX_HISTORIES)
        jumped = has_jumped(history, number)
        if math.isfinite(number) and number > 0:
            history.append(number)
        return jumped

    def _judge_cost(self, whole_ns: int, spent_ns: int) -> None:
        step_ns, pulses_ns = max(1, whole_ns - spent_ns), max(0, spent_ns - self._detail_ns)
        # Pulses come first: fingerprints and copies get the time that pulses leave.
        self._credit.end_step(step_ns, spent_ns - self._turns_ns)
        self._shares.append(pulses_ns / step_ns)
        if len(self._shares) < _JUDGED_STEPS:
            return
        share = sorted(self._shares)[_JUDGED_STEPS // 2]
        self._shares = []
        allowed = self._settings.max_overhead
        most = min(max(1, self._tensor_count * MAX_STEPS_PER_TENSOR), MAX_STRIDE)
        was_over_budget = self._is_over_budget
        self.stride, self._is_over_budget = choose_stride(self.stride, share, allowed, most)
        # Neither the first steps of a job nor a single slow step is a reason for a warning, so the
        # cost has to be too high in two judgements in a row.
        if was_over_budget and self._is_over_budget and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"rank {self._rank}: the black box takes {share:.1%} of a step, more than "
                f"rankdump.blackbox.max_overhead = {allowed:g} allows, although a step measures "
                "the least that it can"
            )


def format_stacks() -> tuple[str, ...]:
    """Return the stacks of the threads of the job, innermost call first; the main thread comes
    first.
    """
    # This function of `sys` is documented, although its name begins with an underscore.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return tuple(
        f"thread {thread}, {names.get(thread, 'not of Python')}:\n"
        + "".join(reversed(traceback.format_stack(frame)))
        for thread, frame in sorted(frames.items(), key=lambda item: (item[0] != main, item[0]))
        if thread == main or not _is_own_thread(frame)
    )


def _is_own_thread(frame: FrameType) -> bool:
    """Return whether rankdump or its gRPC connection started the thread with this frame.

    The start of the stack decides: hooks of rankdump also run on threads of others, such as those
    that torch creates for the backward pass.
    """
    modules = [each.f_globals.get("__name__", "") for each, _ in traceback.walk_stack(frame)]
    if modules[-1] != threading.__name__:
        return False
    target = next((name for name in reversed(modules) if name != threading.__name__), "")
    return target.partition(".")[0] in ("rankdump", "grpc")
