"""The life of a dump that is set up in troubleshooter's words: init, then start and stop.

What a script does wrong is raised where it does it; what goes wrong here is logged, and training
goes on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import RankdumpError
from rankdump.identity import Identity, identify
from rankdump.migrator import clearing
from rankdump.migrator.request import Request, Setting, plan_of
from rankdump.migrator.scopes import Everything, Scope, scope_of
from rankdump.migrator.silence import Silence
from rankdump.migrator.steps import Steps
from rankdump.migrator.window import SILENT, Going, Window, options_of, windowed
from rankdump.session import default
from rankdump.session.agent import AgentFinder, finder
from rankdump.session.apis import KNOWN, ApiFramework, ApiHook, StepWatch, apis_of
from rankdump.session.guard import never_raises

logger = logging.getLogger("rankdump")


@dataclass(slots=True)
class _Observed:
    """What `api_dump_init` made of a model."""

    setting: Setting
    framework: ApiFramework
    hook: ApiHook
    watch: StepWatch
    steps: Steps
    fresh: bool = True
    """Nothing was dumped of it: what stands in its folder is an earlier dump's."""

    def leave(self) -> None:
        """Leave the model as it was."""
        self.watch.remove()
        self.hook.detach()


class Dumping:
    """What a process has set up; its calls may come from any thread."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        agents: AgentFinder = finder,
        framework_of: Callable[[object], ApiFramework | None] = apis_of,
    ) -> None:
        """`environ` is the process's own by default, and so are `agents`."""
        self._framework_of = framework_of
        self._environ = os.environ if environ is None else environ
        self._agents = agents
        self._lock = threading.RLock()
        self._observed: _Observed | None = None
        self._request = Request()
        self._scope: Scope = Everything()
        self._window: Window | None = None
        self._windows = 0
        self._said: set[str] = set()

    def init(self, net: object, setting: Setting) -> None:
        """Count the calls of a model from now on; TypeError for one of no known framework."""
        framework = self._framework_of(net)
        if framework is None:
            raise TypeError(f"api_dump_init: net {net!r} is not allowed; allowed: {KNOWN}")
        with self._lock:
            self._observe(net, setting, framework)

    def start(self, request: Request) -> None:
        """Dump from now on; RuntimeError without `init`, ValueError for a plan that cannot be."""
        with self._lock:
            observed = self._known("api_dump_start")
            plan_of(observed.setting, request, observed.framework.NAME)
            self._open(observed, request)

    def stop(self) -> None:
        """Dump nothing until `start`, and have in the tree what was dumped."""
        with self._lock:
            observed = self._known("api_dump_stop")
            self._close(observed)

    def step(self, number: int | None = None) -> None:
        """Begin a step, by default the next one: from now on the script says where they begin."""
        with self._lock:
            if self._observed is not None:
                self._begin(self._observed.steps.tell(number))

    # -- what is heard of the model

    @never_raises
    def called(self, manner: str, *, trains: bool) -> None:
        """Hear that the model is called."""
        observed = self._observed
        if observed is None:
            return
        with self._lock:
            if observed.steps.called(manner, trains=trains, optimized=observed.watch.optimized):
                self._begin(observed.steps.number)

    @never_raises
    def stepped(self) -> None:
        """Hear that an optimizer of the model is done with its step."""
        if self._observed is not None:
            self._observed.steps.stepped()

    # -- how it is done

    def _known(self, call: str) -> _Observed:
        if self._observed is None:
            raise RuntimeError(f"{call}: api_dump_init was not called; call it first")
        return self._observed

    @never_raises
    def _observe(self, net: object, setting: Setting, framework: ApiFramework) -> None:
        earlier, self._observed = self._observed, None
        self._end()
        if earlier is not None:
            earlier.leave()
        dropouts = framework.without_dropout(net)
        layers = f"{dropouts} {'layer' if dropouts == 1 else 'layers'} of the model"
        self._say(f"dropout is off from now on, in {layers} and where it is called as a function")
        hook = framework.api_hook(net, Silence(), graph=0, options=SILENT)
        hook.iteration_begins(0, False)
        watch = framework.watch_steps(net, self)
        self._observed = _Observed(setting, framework, hook, watch, Steps())
        default.also_step(self.step)
        if setting.compare_statedict:
            rank = self._identity(setting).rank
            framework.save_state(net, clearing.make_rank_folder(setting.output_path, rank))

    @never_raises
    def _open(self, observed: _Observed, request: Request) -> None:
        self._end()
        if request != self._request or observed.fresh:
            self._request, self._scope = request, scope_of(request.mode, request.scope)
        try:
            going = self._going(observed, request)
            if observed.fresh and not going.agent.missing:
                root, rank = observed.setting.output_path, going.identity.rank
                clearing.clear(root, rank, observed.framework.NAME)
                observed.fresh = False
        except (RankdumpError, OSError) as error:
            logger.error("rankdump: nothing will be dumped: %s", error)
            return
        kept = observed.setting.retain_backward
        options = options_of(request, self._scope, retain_backward=kept)
        self._window = Window(going, observed.hook, options)
        self._windows += 1
        if not going.agent.missing:
            self._say(f"API dump goes to {self._folder(observed)}")

    def _going(self, observed: _Observed, request: Request) -> Going:
        plan = plan_of(observed.setting, request, observed.framework.NAME)
        identity = self._identity(observed.setting)
        address = self._agents.find(self._environ)
        return Going(plan, windowed(identity, self._windows), address, observed.steps.upcoming)

    @never_raises
    def _close(self, observed: _Observed) -> None:
        window = self._window
        self._end()
        if window is None:
            self._say("API dump stopped; it did not run")
            return
        for sentence in self._scope.missing():
            self._say(f"API dump: {sentence}")
        if window.undelivered:
            self._say("API dump stopped", about="stopped")
        elif window.calls or window.marks:
            text = f"API dump stopped: {window.calls} calls in {self._folder(observed)}"
            self._say(text, about="stopped")
        else:
            why = "no call of an API came" if self._request.mode == "all" else "no call is in scope"
            self._say(f"API dump stopped, nothing was dumped: {why}")

    def _begin(self, number: int) -> None:
        if self._window is not None:
            self._window.step(number)

    def _end(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()

    def _folder(self, observed: _Observed) -> Path:
        rank = self._identity(observed.setting).rank
        return clearing.rank_folder(observed.setting.output_path, rank)

    def _identity(self, setting: Setting) -> Identity:
        return identify(self._environ, tree=str(setting.output_path))

    def _say(self, text: str, *, about: str = "") -> None:
        # A loop that starts and stops in every step must not fill the log of the job.
        known = (about or text) in self._said
        self._said.add(about or text)
        logger.log(logging.INFO if known else logging.WARNING, "rankdump: %s", text)
