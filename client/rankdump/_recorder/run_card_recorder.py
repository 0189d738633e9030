"""Run card of the running iteration: collects what adapters and scripts report, adds facts about
the process, and passes to the black box what it keeps too. Called on the training thread.

The facts are command line, versions, variables of an allow-list, git revision and states of
generators. They are read from small files only, and no process is started. Text that looks like a
secret is masked. Masking too much hides a difference between runs; masking too little publishes a
password. So the names of secrets are matched generously, except if the value is a plain number or
the name says that it counts something.
"""

from __future__ import annotations

import os
import platform
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

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

MASK = "***"
_SECRET_NAME = re.compile(
    r"passw|passphrase|pwd|secret|token(?!i[sz])|api[-_]?key|access[-_]?key|private[-_]?key"
    r"|account[-_]?key|credential|auth(?!ors?(?![a-z]))|bearer|signature|cookie|dsn|webhook",
    re.I,
)
_PASSWORD_NAME = re.compile(r"passw|passphrase|pwd|secret|pin$", re.I)
"""Names whose value is masked even if it is a number."""
_PLAIN_VALUE = re.compile(r"[-+]?[0-9][0-9_.,]*(?:e[-+]?[0-9]+)?|true|false|yes|no|none|null", re.I)
_OPTION = re.compile(r"(?P<name>-{0,2}[^\s=:]{1,200})(?P<join>=|:\s*)(?P<value>.*)", re.S)
_TOKEN_FORMS = re.compile(
    r"\b(?:hf|ghp|gho|ghu|ghs|ghr|glpat|sk|pk|rk|xox[abposr]|npm|pypi|dop_v1|wandb|nvapi|AKIA|ASIA"
    r"|github_pat)(?:[-_][A-Za-z0-9_-]{12,}|(?<=A)[A-Z0-9]{16})"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"
    r"|\bAIza[A-Za-z0-9_-]{30,}"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL_SECRET = re.compile(r"(?<=[?&])([^=&#\s]{1,100})=([^&#\s]+)")
_RANDOM_TEXT = re.compile(
    r"(?<![A-Za-z0-9+/_-])(?=[A-Za-z0-9+/_-]*[a-z])(?=[A-Za-z0-9+/_-]*[A-Z])"
    r"(?=[A-Za-z0-9+/_-]*[0-9])[A-Za-z0-9+_-]{32,}={0,2}(?![A-Za-z0-9+/_.-])"
)
"""Long texts with letters of both cases and digits that are no paths: keys whose name does not show
that they are secret.
"""


def mask_value(text: str) -> str:
    """Return a text in which all parts that look like a secret are masked.

    >>> mask_value("https://me:pass@host/x?sig=abc&page=2")
    'https://***@host/x?sig=abc&page=2'
    """
    text = _URL_LOGIN.sub(MASK, text)
    text = _URL_SECRET.sub(
        lambda found: f"{found[1]}={MASK}" if _SECRET_NAME.search(found[1]) else found[0], text
    )
    return _RANDOM_TEXT.sub(MASK, _TOKEN_FORMS.sub(MASK, text))


def mask_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a command with secrets masked.

    >>> mask_arguments(["train.py", "--api-key", "abc", "hub.token=xyz", "--max-tokens=512"])
    ('train.py', '--api-key', '***', 'hub.token=***', '--max-tokens=512')
    """
    masked: list[str] = []
    name = ""
    for argument in arguments:
        if name and not argument.startswith("-"):
            masked.append(_mask_named(name, argument))
            name = ""
            continue
        name = ""
        option = _OPTION.fullmatch(argument)
        if option is not None and not argument.startswith(("/", "http")):
            value = _mask_named(option["name"], option["value"])
            masked.append(option["name"] + option["join"] + value)
            continue
        if argument.startswith("-") and _SECRET_NAME.search(argument):
            name = argument
        masked.append(mask_value(argument))
    return tuple(masked)


def _mask_named(name: str, value: str) -> str:
    is_secret = bool(_SECRET_NAME.search(name))
    if is_secret and _PLAIN_VALUE.fullmatch(value):
        is_secret = bool(_PASSWORD_NAME.search(name))
    return MASK if is_secret and value else mask_value(value)


ALLOWED_VARIABLES = (
    "ACLNN_CACHE_LIMIT",
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ATB_LLM_LCOC_ENABLE",
    "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "ATEN_CPU_CAPABILITY",
    "CLOSE_MATMUL_K_SHIFT",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HCCL_ALGO",
    "HCCL_DETERMINISTIC",
    "HIP_VISIBLE_DEVICES",
    "LCCL_DETERMINISTIC",
    "LOCAL_WORLD_SIZE",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "MS_DEV_JIT_SYNTAX_LEVEL",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANKDUMP_PERTURB",
    "TASK_QUEUE_ENABLE",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "WORLD_SIZE",
)
"""Environment variables that may change results or their order. None of them holds a secret; the
list has no patterns, so that no variable with a secret can match.
"""
_MODULES = (
    "accelerate",
    "apex",
    "deepspeed",
    "flash_attn",
    "jax",
    "lightning",
    "megatron.core",
    "mindspore",
    "numpy",
    "pytorch_lightning",
    "rankdump",
    "torch",
    "torch_npu",
    "torchtitan",
    "transformer_engine",
    "transformers",
    "triton",
    "vllm",
    "xformers",
)
"""Modules whose versions are reported if they are loaded; no module is imported for that."""
_CANN_VARIABLES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_CANN_FILES = ("version.cfg", "compiler/version.info", "runtime/version.info")
_CANN_VERSION = re.compile(r"(?:^Version=|_running_version=\[)([0-9A-Za-z.]+)", re.M)
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MAX_TEXT = 256
_MAX_MASKED_TEXT = 4096
_MAX_ARGUMENTS = 128
_MAX_FOLDERS = 32
_MAX_FILE_BYTES = 1 << 22


def read_command() -> tuple[str, ...]:
    """Return the command line of the process, with secrets masked, and long texts and lists cut."""
    arguments = sys.orig_argv or sys.argv
    # Arguments are masked before they get their final length, because half of a token no longer
    # looks like a token.
    masked = mask_arguments([each[:_MAX_MASKED_TEXT] for each in arguments[:_MAX_ARGUMENTS]])
    more = ("...",) if len(arguments) > _MAX_ARGUMENTS else ()
    return (*map(_cut_text, masked), *more)


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the allow-list that are set."""
    return {
        name: _cut_text(mask_value(environ[name])) for name in ALLOWED_VARIABLES if name in environ
    }


def read_versions() -> dict[str, str]:
    """Return the versions of Python, of loaded modules, and of CUDA or ROCm."""
    versions = {"python": platform.python_version()}
    for name in _MODULES:
        version = getattr(sys.modules.get(name), "__version__", "")
        if version:
            versions[name] = _cut_text(str(version))
    built: Any = getattr(sys.modules.get("torch"), "version", None)
    for name, attribute in (("cuda", "cuda"), ("rocm", "hip")):
        version = getattr(built, attribute, None)
        if isinstance(version, str):
            versions[name] = _cut_text(version)
    return versions


def find_cann_version(environ: Mapping[str, str]) -> str:
    """Return the version of CANN in the folder that the environment names; empty without one."""
    folders = [Path(environ[name]) for name in _CANN_VARIABLES if environ.get(name)]
    for path in (folder / name for folder in folders for name in _CANN_FILES):
        found = _CANN_VERSION.search(_read_text(path))
        if found:
            return _cut_text(found[1])
    return ""


def find_revision(start: Path) -> str:
    """Return the commit that is checked out in the git repository of a folder; empty if there is no
    repository, or if the commit cannot be read.
    """
    for folder in (start, *start.parents)[:_MAX_FOLDERS]:
        place = folder / ".git"
        if place.is_dir():
            return _read_commit(place, place)
        if place.is_file():  # a worktree or submodule has a file with the path of the folder
            own = folder / _read_text(place).removeprefix("gitdir:").strip()
            shared = _read_text(own / "commondir").strip()
            return _read_commit(own, own / shared if shared else own)
    return ""


def _read_commit(own: Path, shared: Path) -> str:
    head = _read_text(own / "HEAD").strip()
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref: ").strip()
    if ".." in name or name.startswith("/"):
        return ""
    for folder in (own, shared):
        commit = _read_text(folder / name).strip()
        if _COMMIT.fullmatch(commit):
            return commit
    for line in _read_text(shared / "packed-refs").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and _COMMIT.fullmatch(commit):
            return commit
    return ""


def find_script_folder() -> Path:
    """Return the folder of the script, or the current folder if the process has no script."""
    main: ModuleType | None = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return Path(os.path.realpath(file)).parent if file else Path.cwd()


def read_random_states() -> dict[str, str]:
    """Return digests of the global random generators of Python and numpy, by their names in a run
    card.
    """
    # `hash` of a tuple of integers is the same in all processes, and takes a tenth of the time of a
    # digest of its text.
    digests = {"random.python": f"{hash(random.getstate()[1]) % (1 << 64):016x}"}
    module: Any = sys.modules.get("numpy.random")
    state: Sequence[Any] | Mapping[str, Any] = () if module is None else module.get_state()
    if isinstance(state, tuple) and state:
        digest = xxhash.xxh3_64(state[1].tobytes())
        digest.update(repr(state[2:]).encode())
        digests["random.numpy"] = digest.hexdigest()
    return digests


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _cut_text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


_MAX_DIGESTS = 64
_MAX_NUMBERS = 64
_MAX_PARAMETERS = 4096
_MAX_NAME_CHARACTERS = 512
_MAX_OPTIMIZERS = 8
"""Maximum number of optimizers whose rates are kept in a step; a program that runs optimizers
within the backward pass may have one for each parameter.
"""


class OptimizerRates:
    """Names of learning rates: the optimizers of a step are numbered in the order in which they
    first step.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def begin_step(self) -> None:
        """Begin a step, and number its optimizers anew."""
        self._numbers = {}

    def name_rates(self, optimizer: object, rates: Sequence[float]) -> dict[str, float]:
        """Return the learning rates of the parameter groups of an optimizer, by their names.

        The rates of the first optimizer are named `learning_rate.0`, `learning_rate.1` and so on,
        as before optimizers had numbers; those of the second optimizer `learning_rate.1.0` and so
        on.
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
        """`warn` logs a text once; `environ` is the environment of the process by default."""
        self._layouts, self._black_box, self._warn = layouts, black_box, warn
        self._environ = os.environ if environ is None else environ
        self._facts: RunCard | None = None
        """The part of the card that is the same in all iterations."""
        self.has_black_box = black_box is not None
        """Whether the hooks of a black box report batch, generators and learning rates."""
        self._names: dict[int, str] = {}
        """Names of the models by the numbers of their graphs."""
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
        """Keep the digest of an input of the step, such as its batch."""
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
        """Keep the digests of the random generators of Python and numpy."""
        self._digests.update(read_random_states())

    def use_settings(self, settings: Mapping[str, str]) -> None:
        """Keep the seeds and the flags of determinism of a framework."""
        self._settings.update(settings)

    def add_model(self, graph: int, summary: ModelSummary) -> None:
        """Keep the summary of an attached model; it replaces an earlier summary of the
        same graph.
        """
        self._models[graph] = replace(summary, name=self._names.get(graph, ""))

    def name_model(self, graph: int, name: str) -> None:
        """Keep the name of an attached model."""
        self._names[graph] = name

    def add_parameters(self, graph: int, digests: Mapping[str, ParameterDigest]) -> None:
        """Keep digests of a model's parameters before the step, by their logical names; the names
        of further models' parameters begin with the model's name.
        """
        prefix = f"{self._names.get(graph, '')}:" if graph else ""
        for name, found in digests.items():
            if len(self._parameters) < _MAX_PARAMETERS:
                key = f"{prefix}{name}"[:_MAX_NAME_CHARACTERS]
                self._parameters[key] = format_parameter(found)

    def find_layout(self, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout that the script declared for a parameter, if it fits this shape."""
        return self._layouts.find_layout(name, shape) if self._layouts.declarations else None

    def make_card(self) -> bytes:
        """Return the serialized card of the running iteration. An error is logged, and the result
        is empty then, because the end of the iteration must be sent all the same.
        """
        try:
            if self._facts is None:
                self._facts = self._read_facts()
            card = replace(
                self._facts,
                # More modules may have been loaded since the facts were read.
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
