"""Session of one rank from start to end, as a training script drives it: iterations, attached
models, arrays, losses. Internal errors are logged and never reach the script; only the loss of a
tensor under a strict plan does.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex, TypeVar, cast

from rankdump._core.determinism import (
    PERTURB_WARNING,
    ReplayReport,
    find_perturbation_fault,
    read_perturbation,
)
from rankdump._core.hook_meter import HOOK_METER
from rankdump._core.plan import DumpPlan, plan_to_json
from rankdump._core.rank_identity import (
    RankIdentity,
    find_process_group,
    identify_rank,
    make_session_request,
    read_timeout_variables,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    HiddenHook,
    IterationHook,
    TensorNameFinder,
)
from rankdump._core.session_protocol import SessionRequest
from rankdump._frameworks.arrays import (
    SIDES,
    ArrayOperatorRecorder,
    check_array_place,
    make_graph_nodes,
)
from rankdump._frameworks.model_observer import format_type
from rankdump._layout.tree_paths import make_folder_name
from rankdump._recorder.declared_layouts import LayoutDeclaration, declare_layout
from rankdump._session.agent_finder import AgentAddress, default_agent_finder
from rankdump._session.framework_adapters import (
    HookFactory,
    OptimizerHook,
    find_model_name,
    is_torch_module,
    make_array_source,
    make_data_parallel_hook,
    make_hook,
    make_optimizer_hook,
    make_perturbation_hook,
    make_pulse_hook,
    make_step_replay,
)
from rankdump._session.plan_source import PlanSource, load_session_config_or_log, resolve_plan
from rankdump.errors import ExhaustedError, RankdumpError

if TYPE_CHECKING:
    from rankdump._recorder.pipeline import DumpPipeline


class SessionHooks:
    """Hooks of a session, in the order in which their models were attached."""

    def __init__(self) -> None:
        self._hooks: list[IterationHook] = []

    def add(self, hook: IterationHook, iteration: int, armed: bool) -> None:
        """Add a hook, and notify it of the running iteration."""
        self._hooks.append(hook)
        hook.iteration_begins(iteration, armed)

    def begin(self, iteration: int, armed: bool) -> None:
        """Notify the hooks that an iteration begins, or that dumping is switched within it."""
        for hook in self._hooks:
            hook.iteration_begins(iteration, armed)

    def end(self, iteration: int, armed: bool) -> None:
        """Notify the hooks that an iteration has ended."""
        for hook in self._hooks:
            hook.iteration_ends(iteration, armed)

    def hide(self, iteration: int, on: bool, armed: bool) -> None:
        """Notify the hooks that a repetition of a part of the iteration begins or ends."""
        for hook in self._hooks:
            if isinstance(hook, HiddenHook):
                hook.hide(on)
            else:
                hook.iteration_begins(iteration, armed)

    def find_name(self, tensor: object) -> str:
        """Return the name of a parameter or buffer of an attached model; empty for any other
        tensor.
        """
        named = (pair for model in self.list_models() for pair in model.iterate_named())
        return next((name for name, each in named if each is tensor), "")

    def list_models(self) -> list[TensorNameFinder]:
        """Return the hooks of models whose tensors have names."""
        return [hook for hook in self._hooks if isinstance(hook, TensorNameFinder)]

    def detach(self) -> None:
        """Restore the models."""
        for hook in self._hooks:
            hook.detach()


_logger = logging.getLogger("rankdump")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def never_raises(method: Callable[_P, None]) -> Callable[_P, None]:
    """Log exceptions of a method; only the ExhaustedError of a strict plan is raised."""

    @wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        is_measured = HOOK_METER.is_on and HOOK_METER.begin()
        try:
            method(*args, **kwargs)
        except ExhaustedError:
            raise
        except Exception:
            _logger.exception("rankdump: internal error in %s", method.__name__)
        finally:
            if is_measured:
                HOOK_METER.end()

    return guarded


def load_session_modules() -> None:
    """Load the modules that the first session of a process needs: gRPC and the recorder."""
    import rankdump._recorder.pipeline  # noqa: F401  # pyright: ignore[reportUnusedImport]


MAX_MICROBATCH = (1 << 32) - 1
"""Largest number of a micro-batch: records have 32 bits for it."""


def parse_microbatch(index: object) -> int | str:
    """Return the number of a micro-batch, or a text that says what is wrong with it."""
    try:
        number = -1 if isinstance(index, bool) else cast("SupportsIndex", index).__index__()
    except (AttributeError, TypeError, ValueError):  # an object, or a tensor that is no number
        number = -1
    if 0 <= number <= MAX_MICROBATCH:
        return number
    given = f"{index!r}"[:60]
    return f"microbatch({given}) is not allowed; allowed: a whole number from 0 to {MAX_MICROBATCH}"


class Session:
    """Session: the dump of one rank. Without a plan it is off, and every call costs one branch.

    Iterations count from 0. Call `step(i)` where iteration i begins, or `step()` where one ends;
    the last iteration ends with `close()`, which runs by itself at exit. The configuration's
    `initial_iteration` is added to every number, also to the numbers given to `step`.

    >>> Session().active
    False
    """

    def __init__(
        self,
        plan: DumpPlan | PlanSource | None = None,
        *,
        config_source: bytes = b"",
        identity: RankIdentity | None = None,
        agent: str | AgentAddress = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`environ`, by default the environment of the process, supplies what is not given: the
        rank, by its launcher's variables, and the agent, by RANKDUMP_AGENT. It also sets timeouts
        of communication and names certificates.

        Without an agent on this host the session starts one, shared by the job's ranks on the host.
        ConfigError if a configuration object cannot be used.
        """
        environ = os.environ if environ is None else environ
        plan = None if plan is None else resolve_plan(plan, environ)
        self._pipeline: DumpPipeline | None = None
        self._hooks = SessionHooks()
        self.models: list[str] = []
        """Names of the models so far; the index is the number of the graph."""
        self._begun_by_script = False  # whether the script began the iteration
        self._initial_iteration = 0 if plan is None else plan.selection.initial_iteration
        self._strict = plan is not None and plan.delivery.strict
        self._finds_optimizers = plan is not None and plan.selection.optimizer_states
        self._optimizers: OptimizerHook | None = None
        self._reported_losses = 0
        self._attached: list[Any] = []
        """Models that `attach` observes."""
        self._is_replaying = False
        self.last_replay: ReplayReport | None = None
        """Result of the last call of `replay` that ran to its end; None before."""
        self._is_only_rank = False
        self._rank = 0
        self._perturbation = read_perturbation(environ)
        self.closed = False
        """Whether `close` was called."""
        self.undelivered = 0
        """Tensors that had not reached an agent when the session was closed."""
        self.refused = False
        """Whether the agent had rejected this rank when the session was closed."""
        if plan is not None:
            who, text = identity or identify_rank(environ, plan.output.root), plan_to_json(plan)
            self._is_only_rank = who.world_size == 1
            self._rank = who.rank
            request = make_session_request(who, plan_json=text, config_source=config_source)
            self._start(plan, request, agent, environ)
            self._report_perturbation(environ)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Session:
        """Make the session that RANKDUMP_CONFIG, else MINDSPORE_DUMP_CONFIG, configures.

        Without either variable the session is off. It is also off if the file cannot be used; the
        reason is logged once.
        """
        environ = os.environ if environ is None else environ
        config = load_session_config_or_log(environ)
        if config is None:
            return cls()
        return cls(
            config.plan,
            config_source=config.source,
            identity=config.identity,
            environ=environ,
        )

    @property
    def active(self) -> bool:
        """Whether there is a plan."""
        return self._pipeline is not None

    @never_raises
    def step(self, iteration: int | None = None) -> None:
        """End the running iteration, and begin another one, by default the next."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        if self._is_only_rank:
            self._check_process_group(pipeline)
        given = None if iteration is None else self._initial_iteration + int(iteration)
        following = pipeline.iteration + 1 if given is None else given
        if following < 0:
            pipeline.recorder.warn_once(
                f"step({iteration}) is not allowed; allowed: a number from 0 on"
            )
            return
        if following == pipeline.iteration:
            self._begun_by_script = True
            self._add_random_states(pipeline)
            return
        began = self._begun_by_script or given is None
        # A loop that continues from a checkpoint calls `step` at its begin; the iteration before
        # that call, in which nothing ran, is ended without dumping parameters.
        self._end_iteration(pipeline, ran=began, armed=began or pipeline.has_run)
        pipeline.begin_iteration(following)
        self._begun_by_script = given is not None
        self._add_random_states(pipeline)
        self._notify_hooks(pipeline)
        self._raise_losses(pipeline)

    @never_raises
    def microbatch(self, index: SupportsIndex) -> None:
        """Begin a micro-batch of the running iteration; `step` ends the last one.

        Forward passes from now on have this number, and so have their gradients, whenever these
        arrive. It replaces the number that a pipeline schedule or `no_sync` gives.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        number = parse_microbatch(index)
        if isinstance(number, str):
            pipeline.recorder.warn_once(number)
            return
        self._array_operators.end_operators()
        pipeline.set_microbatch(number)

    @never_raises
    def dump(
        self, op_type: str, op_name: str, side: str, slot: int, array: Any, *, graph: int = 0
    ) -> None:
        """Dump one array: `side` is `input` or `output`, `op_name` the full scope name.

        `array` is a torch tensor or anything that numpy can view. Consecutive calls with the same
        `op_name` belong to one operator. A plan that keeps the operator that raised reads arrays
        only after an error has ended the session: those of the last operator that was dumped.
        """
        pipeline = self._pipeline
        if pipeline is None or not pipeline.armed:
            return
        fault = check_array_place(side, slot, graph)
        if fault:
            pipeline.recorder.warn_once(f"dump of {op_name}: {fault}")
        else:
            self._array_operators.record_array(op_type, op_name, SIDES[side], slot, array, graph)

    @never_raises
    def constant(self, name: str, array: Any, *, graph: int = 0) -> None:
        """Dump an array that never changes, once for its graph, in the first dumped iteration."""
        if self._pipeline is not None:
            self._array_operators.record_constant(name, array, graph)

    @never_raises
    def graph(
        self, names: Sequence[str], *, graph: int = 0, op_types: Sequence[str] | None = None
    ) -> None:
        """Set the order in which a framework compiled a graph, by full scope names.

        This order replaces the observed one. Without `op_types` the types are taken from the names.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        nodes = make_graph_nodes(names, op_types)
        if isinstance(nodes, str):
            pipeline.recorder.warn_once(f"graph {graph}: {nodes}")
        else:
            pipeline.recorder.set_compiled_order(graph, nodes)

    @never_raises
    def attach(self, model: Any, name: str = "", *, inside_compiled: bool = False) -> None:
        """Observe a model's operators from now on; warn once for an unknown framework.

        `name` is the model's folder if the plan does not name all models; by default it is the name
        of the model's class. `inside_compiled` also observes operators inside regions that
        torch.compile compiles after this call; it adds operators to the compiled code, in all
        iterations.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        make = partial(make_hook, model, inside_compiled=inside_compiled)
        count = len(self.models)
        self.observe(make, name or find_model_name(model))
        if len(self.models) > count:
            self._attached.append(model)
            self._add_model_hooks(pipeline, model)
        if self._finds_optimizers:
            hook = self._get_optimizer_hook(pipeline)
            if hook is not None:
                hook.find_optimizers()

    def _add_model_hooks(self, pipeline: DumpPipeline, model: object) -> None:
        """Add the hooks that a model needs in addition to the one that records it."""
        graph, recorder, pulses = len(self.models) - 1, pipeline.recorder, pipeline.black_box
        if pulses is not None:
            hook = make_pulse_hook(model, recorder, pulses, graph=graph, name=self.models[graph])
            self._add_hook(pipeline, hook, "the black box measures models of torch only")
        if self._perturbation:
            hook = make_perturbation_hook(model, recorder, graph=graph)
            self._add_hook(pipeline, hook, "the inputs of models of torch alone can be moved")

    def _add_hook(self, pipeline: DumpPipeline, hook: IterationHook | None, refusal: str) -> None:
        """Add a hook; if there is none, warn about what is not allowed."""
        if hook is None:
            pipeline.recorder.warn_once(refusal)
        else:
            self._hooks.add(hook, pipeline.iteration, pipeline.armed)

    def _report_perturbation(self, environ: Mapping[str, str]) -> None:
        pipeline, fault = self._pipeline, find_perturbation_fault(environ)
        if pipeline is not None and self._rank == 0 and (fault or self._perturbation):
            pipeline.recorder.warn_once(fault or PERTURB_WARNING)

    @never_raises
    def note(self, **numbers: float) -> None:
        """Keep numbers of the running iteration: `session.note(loss=loss.item())`.

        The numbers are kept in the run card and in the black box, which is frozen by a loss that is
        not finite or far above the earlier losses. A value that is not a number causes one warning.
        """
        pipeline = self._pipeline
        causes = pipeline and (pipeline.card or pipeline.black_box)
        if pipeline is None or causes is None:
            return
        try:
            found = {name: float(number) for name, number in numbers.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            pipeline.recorder.warn_once(f"note({', '.join(numbers)}) is not allowed: {error}")
            return
        causes.note(found)

    def replay(
        self,
        step: Callable[..., _R],
        *args: Any,
        also: object = (),
        **keywords: Any,
    ) -> _R:
        """Run a step of the training twice from the same state, and compare all digests.

        Return `step(*args, **keywords)` of the first run, which is the one in the dump; the state
        after it is restored, so the training continues as after one run. `last_replay` says whether
        all inputs, outputs, gradients, parameters, buffers, states of optimizers and generators
        were equal, and if not, which operator differed first. All ranks must call this together.

        Saved and restored are: parameters, buffers and gradients of attached models, optimizers,
        schedulers of learning rates, gradient scalers, and the random generators of torch, numpy
        and Python. `also` is another object, or a list of objects, with `state_dict` and
        `load_state_dict`, or `get_state` and `set_state`. An error of the first run propagates; an
        error of the second run is in the report. Without a plan, or if the state cannot be copied,
        the step runs once.
        """
        pipeline, run = self._pipeline, partial(step, *args, **keywords)
        if pipeline is None or self._is_replaying:
            return run()
        torch_models = [model for model in self._attached if is_torch_module(model)]
        if not torch_models:
            pipeline.recorder.warn_once("replay ran a step once: no torch model is attached")
            return run()
        others = cast("Sequence[object]", also if isinstance(also, (list, tuple)) else (also,))
        replay = make_step_replay(
            torch_models, others, run, self._hide, iteration=pipeline.iteration, rank=self._rank
        )
        self._is_replaying = True
        try:
            result = replay.run()
        finally:
            self._is_replaying = False
        self._report_replay(pipeline, replay.report)
        return result

    @never_raises
    def _report_replay(self, pipeline: DumpPipeline, report: ReplayReport) -> None:
        self.last_replay = report
        pipeline.add_replay(report)

    @contextmanager
    def _hide(self) -> Generator[None]:
        """Record nothing in the block, and ignore the script's calls of the session."""
        pipeline = self._pipeline
        if pipeline is None:  # the step has closed the session
            yield
            return
        with pipeline.hide():
            self._hooks.hide(pipeline.iteration, True, pipeline.armed)
            self._pipeline = None
            try:
                yield
            finally:
                self._pipeline = pipeline
        self._hooks.hide(pipeline.iteration, False, pipeline.armed)

    @never_raises
    def observe(self, make: HookFactory, name: str) -> None:
        """Observe a model with the hook that `make` returns; `close` detaches it.

        `name` is the model's folder if the plan does not name all models.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        graph = len(self.models)
        hook = make(pipeline.recorder, graph=graph)
        if hook is not None:
            self.models.append(make_folder_name(name))
            pipeline.add_model(graph, self.models[-1])
            self._hooks.add(hook, pipeline.iteration, pipeline.armed)

    @never_raises
    def dump_start(self) -> None:
        """Dump from now on, whatever iterations the plan names; its devices and operators still
        apply.
        """
        self._set_dumping(True)

    @never_raises
    def dump_stop(self) -> None:
        """Dump nothing until `dump_start` is called."""
        self._set_dumping(False)

    @never_raises
    def limit(self, name: str, seconds: float) -> None:
        """Declare a timeout of communication that no environment variable sets; 0 for no limit."""
        if self._pipeline is not None:
            self._pipeline.limit(name, seconds)

    @never_raises
    def optimizer(self, optimizer: Any) -> None:
        """Record the states of an optimizer of torch from now on, at the end of each iteration.

        All tensors that it keeps for the parameters of attached models are recorded, such as
        `exp_avg`, `momentum_buffer` and master weights, with names such as
        `Optimizer/layers.0.weight.exp_avg` and the type `OptimizerState`. An object that is not an
        optimizer causes one warning.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        hook = self._get_optimizer_hook(pipeline)
        if hook is None or not hook.add_optimizer(optimizer):
            pipeline.recorder.warn_once(
                f"optimizer of type {format_type(optimizer)} is not allowed; allowed: "
                f"torch.optim.Optimizer, or an object with its param_groups and state"
            )

    @never_raises
    def data_parallel(self, model: Any) -> None:
        """Also record the tensors that data parallelism gathers and reduces in an attached model.

        `model` was returned by DistributedDataParallel, FullyShardedDataParallel or `fully_shard`,
        or contains such modules. Parameters as the forward reads them, after FSDP gathered them,
        are inputs of the operators with their names; gradients before reduction are inputs of the
        operators with `Gradients/` and their names. Each of these tensors is as large as the whole
        parameter. An object that is not a torch module causes one warning.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        hook = make_data_parallel_hook(model, pipeline.recorder, self._hooks.list_models)
        refusal = f"data_parallel({format_type(model)}) is not allowed; allowed: torch.nn.Module"
        self._add_hook(pipeline, hook, refusal)

    @never_raises
    def layout(
        self,
        target: Any,
        *,
        global_shape: Sequence[int],
        mesh: Mapping[str, int],
        placements: Mapping[str, str],
        ranks: Sequence[int] | None = None,
        global_offset: Sequence[int] | None = None,
        logical_name: str = "",
        side: str = "output",
        slot: int = 0,
    ) -> None:
        """Declare which part of a logical tensor this rank has; the call must be the same on every
        rank.

        `target` is a parameter or buffer of an attached model, or the name of one or of an
        operator; `side` and `slot` select a tensor of an operator. `mesh` has the extents of the
        mesh dimensions by name, `placements` texts such as `Shard(0)`, `ranks` the global ranks in
        C order (by default from 0 on). `global_offset` is required if the placements do not
        determine it. The layout also applies to the gradient. Wrong arguments cause one warning,
        and nothing is declared.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return
        declared = declare_layout(
            self._rank,
            global_shape,
            mesh,
            placements,
            ranks=ranks,
            global_offset=global_offset,
            logical_name=logical_name,
        )
        name = target if isinstance(target, str) else self._hooks.find_name(target)
        fault = declared if isinstance(declared, str) else check_array_place(side, slot, 0)
        if not name:
            fault = "target is not allowed; allowed: a name, or a tensor of an attached model"
        if fault:
            pipeline.recorder.warn_once(f"layout of {name or format_type(target)}: {fault}")
        elif isinstance(declared, LayoutDeclaration):
            pipeline.recorder.declared_layouts.add(name, TensorSide(side), slot, declared)

    def close(self) -> None:
        """End the last iteration, deliver buffered data, and remove the hooks."""
        # If `close` is called in a `finally` block, an error may be propagating; the plan may keep
        # the operator that raised it.
        self._close(ended=True, raised=sys.exc_info()[1] is not None)

    @never_raises
    def _close(self, *, ended: bool, raised: bool) -> None:
        pipeline, self._pipeline = self._pipeline, None
        self.closed = True
        if pipeline is None:
            return
        atexit.unregister(self._close_at_exit)
        self._array_operators.end_operators(raised=raised)
        if ended:
            self._end_iteration(pipeline, ran=self._begun_by_script)
        self._hooks.detach()
        pipeline.close(raised=raised)
        self.undelivered, self.refused = pipeline.undelivered, pipeline.refused
        if not raised:  # a propagating error of the script must not be replaced
            self._raise_losses(pipeline)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close(ended=error is None, raised=error is not None)

    def _start(
        self,
        plan: DumpPlan,
        request: SessionRequest,
        agent: str | AgentAddress,
        environ: Mapping[str, str],
    ) -> None:
        # This is imported here because a session that is off must not load gRPC.
        from rankdump._recorder.pipeline import DumpPipeline
        from rankdump._wire.channel import read_credentials

        if not agent:
            agent = default_agent_finder.find(environ, embedded=plan.delivery.embedded)
        elif isinstance(agent, str):
            agent = AgentAddress(agent)
        self._pipeline = DumpPipeline(
            plan,
            request,
            agent.address,
            read_timeout_variables(environ),
            read_credentials(environ),
            missing=agent.missing,
            is_starting=agent.is_starting,
        )
        self._array_operators = ArrayOperatorRecorder(self._pipeline.recorder, make_array_source)
        self._pipeline.start()
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # After an unhandled exception the running iteration is unfinished.
        ended = not hasattr(sys, "last_value")
        try:
            self._close(ended=ended, raised=not ended)
        except RankdumpError as error:  # a strict plan raised it at exit
            _logger.error("rankdump: %s", error)

    def _get_optimizer_hook(self, pipeline: DumpPipeline) -> OptimizerHook | None:
        if self._optimizers is None:
            hook = make_optimizer_hook(pipeline.recorder, self._hooks.list_models)
            if hook is not None:
                self._optimizers = hook
                self._hooks.add(hook, pipeline.iteration, pipeline.armed)
        return self._optimizers

    def _end_iteration(self, pipeline: DumpPipeline, *, ran: bool, armed: bool = True) -> None:
        self._array_operators.end_operators()
        self._hooks.end(pipeline.iteration, armed and pipeline.armed)
        pipeline.end_iteration(ran=ran)

    def _check_process_group(self, pipeline: DumpPipeline) -> None:
        """Warn if the session began before the process group was created, and so assumed a single
        rank.
        """
        rank, size = find_process_group() or (0, 1)
        if size > 1:
            self._is_only_rank = False
            pipeline.recorder.warn_once(
                f"this process is rank {rank} of {size} in torch.distributed, but its session "
                f"began before init_process_group and treats it as the only rank of its job; open "
                f"the session after init_process_group, or set RANK and WORLD_SIZE"
            )

    def _set_dumping(self, on: bool) -> None:
        pipeline = self._pipeline
        if pipeline is None:
            return
        before = pipeline.armed
        if not on:
            self._array_operators.end_operators()
        pipeline.set_dumping(on)
        if pipeline.armed is not before:
            self._notify_hooks(pipeline)

    def _add_random_states(self, pipeline: DumpPipeline) -> None:
        """Keep the states of the random generators, except torch's, whose states are read at the
        first call of a model.
        """
        if pipeline.card is not None and pipeline.armed and not self.models:
            pipeline.card.add_random_states()

    def _notify_hooks(self, pipeline: DumpPipeline) -> None:
        self._hooks.begin(pipeline.iteration, pipeline.armed)
        self._array_operators.record_waiting_constants()

    def _raise_losses(self, pipeline: DumpPipeline) -> None:
        if self._strict and pipeline.lost_tensors > self._reported_losses:
            lost = pipeline.lost_tensors - self._reported_losses
            self._reported_losses += lost
            raise ExhaustedError(f"{lost} tensors were lost and the plan is strict")
