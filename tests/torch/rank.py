"""Ranks of a gloo job, children of one process: each runs a scenario and pickles its observations.

Run as a program by the tests beside it: scenario, world size, folder, and the folder of the agents'
sockets.
"""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# Old names of collectives are called where the new ones are missing.
# pyright: reportDeprecated=false, reportOperatorIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import pickle
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import all_reduce  # as a script that ran before us has it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from conftest import FakeRecorder
from jobs.rank_processes import fork_ranks

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.rank_identity import RankIdentity
from rankdump._frameworks.torch.input_perturbation import TorchInputPerturbation
from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._session.framework_adapters import make_step_replay

Result = dict[str, object]


def events(recorder: FakeRecorder) -> list[tuple[object, ...]]:
    rows = []
    for event in sorted(recorder.events, key=lambda event: event.position):
        what = event.collective
        if what is not None:
            group = (what.group.name, what.group.ranks)
            size = (what.element_count, what.dtype, what.peer)
            rows.append((what.kind.name, *group, what.sequence, *size, event.name))
    recorder.events.clear()
    return rows


# -- collectives called from Python


def collectives(rank: int, world: int) -> Result:
    result: Result = {}
    recorder, other = FakeRecorder(), FakeRecorder()
    plain = vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"]
    messages = [
        dist.P2POp(dist.isend, torch.ones(2), 1 - rank),
        dist.P2POp(dist.irecv, torch.ones(2), 1 - rank),
    ]
    hook = attach_model(nn.Linear(1, 1), recorder, 3)
    again = attach_model(nn.Linear(1, 1), recorder, 4)
    third = attach_model(nn.Linear(1, 1), other, 0)
    hook.iteration_begins(0, armed=True)
    result["kinds"] = every_kind(rank, recorder)
    result["told twice"] = len(other.events)
    result["messages"] = every_message(rank, recorder, messages)
    result["groups"] = groups(rank, recorder)
    result["async"] = asynchronous(rank, recorder)
    result["failed"] = failing(recorder)
    result["unarmed"] = unarmed(recorder)
    result["threads"] = threads(rank, recorder)
    result["timed out"] = timed_out(rank, recorder)
    result["open"] = sorted(recorder.open)
    result["limits"] = recorder.limits
    again.detach()
    third.detach()
    result["still patched"] = vars(dist.ProcessGroup)["allreduce"] is not plain[0]
    hook.detach()
    restored = vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"]
    result["restored"] = restored == plain
    tensor = torch.ones(1)
    all_reduce(tensor, async_op=True).wait()
    result["after detach"] = tensor.item(), events(recorder)
    result["warnings"] = recorder.warnings
    result["positions"] = recorder.position
    return result


def every_kind(rank: int, recorder: FakeRecorder) -> object:
    two = [torch.zeros(2), torch.zeros(2)]
    all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, dtype=torch.int64), 0)
    dist.reduce(torch.ones(2), 1)
    dist.all_gather(two, torch.full((2,), float(rank)))
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gathered = torch.zeros(4)
    single(gathered, torch.full((2,), float(rank)))
    dist.reduce_scatter(torch.zeros(2), [torch.ones(2), torch.ones(2)])
    dist.gather(torch.ones(2), two if rank == 0 else None)
    dist.scatter(torch.ones(2), two if rank == 1 else None, src=1)
    dist.all_to_all(two, [torch.ones(2), torch.ones(2)])
    dist.all_to_all_single(torch.zeros(4), torch.ones(4))
    dist.barrier()
    dist.monitored_barrier()
    everyone: list[object] = [None, None]
    dist.all_gather_object(everyone, rank)
    assert everyone == [0, 1]
    assert gathered.tolist() == [0, 0, 1, 1]
    return events(recorder)


def every_message(rank: int, recorder: FakeRecorder, batch: list[dist.P2POp]) -> object:
    there, tensor = 1 - rank, torch.full((3,), float(rank))
    got = torch.zeros(3)
    if rank == 0:
        dist.send(tensor, there)
        dist.recv(got, there)
    else:
        dist.recv(got, there)
        dist.send(tensor, there)
    works = [dist.irecv(got, there), dist.isend(tensor, there)]
    for work in works:
        work.wait()
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    sender = dist.recv(got) if rank else dist.send(tensor, there)
    assert got.tolist() == [there] * 3
    assert sender in (None, 0)
    return events(recorder)


def groups(rank: int, recorder: FakeRecorder) -> object:
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    events(recorder)
    for group in (pair, alone, pair):
        all_reduce(torch.ones(1), group=group)
    return [(kind, ranks, number) for kind, _, ranks, number, *_ in events(recorder)]


def asynchronous(rank: int, recorder: FakeRecorder) -> object:
    tensor = torch.ones(4)
    work = all_reduce(tensor, async_op=True)
    answer = type(work).__name__, work.wait(), tensor.tolist()
    followed = all_reduce(tensor, async_op=True).get_future().wait()[0].tolist()
    scattered = dist.reduce_scatter(torch.zeros(1), [torch.ones(1)] * 2, async_op=True)
    other = recorder.start_event(graph=0, name="x")  # something else runs meanwhile
    assert scattered is not None
    scattered.wait()
    overlapped = recorder.events[-1].end_position - recorder.events[-1].position
    recorder.finish_event(other)
    dropped = dist.isend(tensor, 1 - rank)
    kept = weakref.ref(dropped)
    dist.recv(torch.zeros(4), 1 - rank)
    dist.barrier()  # gloo takes a message back whose work goes before it is delivered
    del dropped  # never waited for
    return answer, followed, overlapped, kept() is None, events(recorder)


def failing(recorder: FakeRecorder) -> object:
    try:
        dist.group.WORLD.allreduce("not a tensor")
    except TypeError as error:
        return type(error).__name__, len(events(recorder))
    return None


def unarmed(recorder: FakeRecorder) -> object:
    all_reduce(torch.ones(1))
    before = events(recorder)[0][3]
    recorder.armed = False
    all_reduce(torch.ones(1))
    all_reduce(torch.ones(1))
    nothing = events(recorder)
    recorder.armed = True
    all_reduce(torch.ones(1))
    return nothing, events(recorder)[0][3] - before


def threads(rank: int, recorder: FakeRecorder) -> object:
    """Works that nobody waits for when the groups end must not hang the end."""
    works = [all_reduce(torch.ones(8), async_op=True) for _ in range(50)]
    for work in works[::2]:
        work.wait()
    dist.barrier()
    return len(events(recorder))


def timed_out(rank: int, recorder: FakeRecorder) -> object:
    """Rank 1 never comes."""
    short = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    events(recorder)
    errors = []
    for call in (all_reduce, dist.recv) if rank == 0 else ():
        try:
            call(torch.ones(1), group=short)
        except RuntimeError as error:
            errors.append(type(error).__name__)
    dist.barrier()
    return errors, [event[0] for event in events(recorder)]


# -- DistributedDataParallel


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)))


Setup = Callable[[DistributedDataParallel], object]


def nothing(ddp: DistributedDataParallel) -> None:
    pass


def train(
    rank: int,
    recorder: FakeRecorder | None,
    *,
    sparse: bool = False,
    before: Setup = nothing,
    after: Setup = nothing,
    uneven: bool = False,
    dtype: torch.dtype = torch.float32,
    inner: bool = False,
    **options: object,
) -> list[bytes]:
    torch.manual_seed(0)
    model = Net(sparse=sparse).to(dtype)
    hook = attach_model(model, recorder, 0) if recorder is not None and inner else None
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005, **options)
    before(ddp)
    if recorder is not None and hook is None:
        hook = attach_model(ddp, recorder, 0)
    after(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)
    batches = [torch.randint(20, (5,)) for _ in range(3 + (rank if uneven else 0))]
    with ddp.join(divide_by_initial_world_size=False, enable=uneven):
        for step, batch in enumerate(batches):
            if hook is not None:
                hook.iteration_begins(step, armed=True)
            optimizer.zero_grad()
            if not uneven:
                with ddp.no_sync():
                    ddp(batch).square().sum().backward()
            ddp(batch).square().sum().backward()
            optimizer.step()
            if hook is not None:
                hook.iteration_ends(step, armed=True)
    if hook is not None:
        hook.detach()
    if not uneven:
        ddp(batches[0]).sum().backward()  # after us the model still works
    assert all(p.isfinite().all() for p in model.parameters())
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def user_hook(state, bucket):  # torch wants no annotations here, or real ones
    """Sums, and multiplies by what its state says."""
    factor = state["factor"]
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * factor)


def registers_user_hook(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook({"factor": 0.25}, user_hook)


def registers_builtin(kind: str) -> Setup:
    def register(ddp: DistributedDataParallel) -> None:
        ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))

    return register


def registers_twice(ddp: DistributedDataParallel) -> None:
    registers_user_hook(ddp)
    try:
        registers_user_hook(ddp)
    except RuntimeError:
        return
    raise AssertionError("the second hook must be refused")


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "inner": {"inner": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "sparse": {"sparse": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "uneven": {"uneven": True},
    "hook before": {"before": registers_user_hook},
    "hook after": {"after": registers_user_hook},
    "hooks after": {"after": registers_twice},
    "builtin before": {"before": registers_builtin("ALLREDUCE")},
    "builtin after": {"after": registers_builtin("ALLREDUCE")},
    "fp16 after": {"after": registers_builtin("FP16_COMPRESS")},
}


def buckets(rank: int, world: int) -> Result:
    result: Result = {}
    for name, options in CASES.items():
        expected = train(rank, None, **options)
        recorder = FakeRecorder()
        seen = train(rank, recorder, **options)
        recorder.wait_for_ends()
        result[name] = {
            "same": seen == expected,
            "events": events(recorder),
            "warnings": recorder.warnings,
        }
    return result


def find_files(error: BaseException) -> list[str]:
    """Return the files of an error's traceback, and of the errors behind it."""
    found = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for behind in (error.__cause__, error.__context__):
        found += find_files(behind) if behind is not None else []
    return found


def fail(rank: int, recorder: FakeRecorder | None) -> dict[str, object]:
    """Fail in collectives, when they are called and when they are waited for."""
    short = [dist.new_group([0, 1]) for _ in range(2)]
    ddp = DistributedDataParallel(Net(), process_group=short[0])
    hook = attach_model(ddp, recorder, 0) if recorder is not None else None
    if hook is not None:
        hook.iteration_begins(0, armed=True)
    loss = ddp(torch.zeros(1, dtype=torch.int64)).sum()
    for group in short:
        # Not before: both ranks take part in what DistributedDataParallel has called so far.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)
    mixed = [torch.ones(1), torch.ones(1, dtype=torch.int64)]
    calls: dict[str, Callable[[], object]] = {
        "called": lambda: dist.group.WORLD.allreduce(mixed),
        "functional": lambda: functional.all_reduce(torch.ones(1), "no such operation", short[1]),
    }
    if rank == 0:  # rank 1 never comes
        calls["waited"] = lambda: all_reduce(torch.ones(1), group=short[1])
        calls["bucket"] = loss.backward
    result: dict[str, object] = {}
    if recorder is not None:
        events(recorder)
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            result[name] = find_files(error)
    if recorder is not None:
        recorder.wait_for_ends()
    if hook is not None:
        hook.detach()
    dist.barrier()
    return result


def raising(rank: int, world: int) -> Result:
    recorder = FakeRecorder()
    plain, seen = fail(rank, None), fail(rank, recorder)
    return {"plain": plain, "seen": seen, "kinds": [event[0] for event in events(recorder)]}


# -- a session of its own


def waiting(rank: int, world: int) -> Result:
    """Rank 1 comes to its all-reduce when it is told to."""
    folder = Path(sys.argv[4])
    plan = DumpPlan(output=OutputSettings("/x"))
    agent, identity = f"unix:{folder}/{rank}.sock", RankIdentity(rank, world)
    with rankdump.Session(plan, agent=agent, identity=identity) as session:
        session.attach(nn.Linear(1, 1))
        session.step(0)
        while rank == 1 and not (folder / "go").exists():
            time.sleep(0.01)
        all_reduce(torch.ones(1))
    return {}


# -- steps that run two times


class Noise(nn.Module):
    """Adds another number in each call."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.amount * self.calls


def train_replayed(
    kind: str, *, twice: bool, noise: float = 0.0, also: tuple[object, ...] = ()
) -> tuple[list[float], list[tuple[object, ...]], list[str]]:
    """Two steps; return the losses, the collectives, and the reports."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), Noise(noise), nn.Linear(4, 2))
    if kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    recorder = FakeRecorder()
    hook = attach_model(model, recorder, graph=0)
    losses, reports = [], []

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        all_reduce(total)
        return float(total)

    for iteration in range(2):
        hook.iteration_begins(iteration, True)
        if twice:
            replay = make_step_replay([model], also, step, nullcontext, iteration=iteration, rank=0)
            losses.append(replay.run())
            reports.append(str(replay.report))
        else:
            losses.append(step())
        hook.iteration_ends(iteration, True)
    recorder.wait_for_ends()
    hook.detach()
    return losses, events(recorder), reports


# -- noise runs


def make_words() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def move_words(model: nn.Sequential, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return what the model computes in a noise run, and what its second module gets."""
    seen: list[torch.Tensor] = []
    perturbation = TorchInputPerturbation(model, FakeRecorder(), graph=0)
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    result = model(ids)
    result.square().sum().backward()
    perturbation.detach()
    given = seen[0].to_local() if isinstance(seen[0], DTensor) else seen[0]
    return [result.detach(), given.detach()]


def perturbed(world: int) -> Result:
    """The embedding of one model, whole, in tensor parallelism and in FSDP2."""
    ids, mesh = torch.tensor([1, 7, 3, 0, 5, 2]), init_device_mesh("cpu", (world,))
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    plan = {"0": rows, "1": ColwiseParallel(), "3": RowwiseParallel()}
    sharded = make_words()
    for part in (sharded[0], sharded[1], sharded[3], sharded):
        fully_shard(part, mesh=mesh)
    models = {
        "whole": make_words(),
        "tp": parallelize_module(make_words(), mesh, plan),
        "fsdp2": sharded,
    }
    return {name: move_words(model, ids) for name, model in models.items()}


def replays(rank: int, world: int) -> Result:
    found: Result = {"moved": perturbed(world)}
    for kind in ("ddp", "fsdp2"):
        plain = train_replayed(kind, twice=False)
        found[kind] = [plain, train_replayed(kind, twice=True)]
    found["noise"] = train_replayed("ddp", twice=True, noise=1e-3 * rank)[2]
    found["refused"] = train_replayed("ddp", twice=True, also=("text",) * rank)[2]
    return found


def run_rank(scenario: str, rank: int, world: int, folder: str) -> None:
    """Run a scenario as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=90),
    )
    scenarios = (collectives, buckets, raising, waiting, replays)
    run = {each.__name__: each for each in scenarios}[scenario]
    result = run(rank, world)
    dist.destroy_process_group()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))


def main() -> None:
    scenario, world, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sys.exit(fork_ranks(world, lambda rank: run_rank(scenario, rank, world, folder)))


if __name__ == "__main__":
    main()
