"""Graphs, arguments and names that an agent writes beside the tensors."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.graph import GraphNode, GraphParameter, GraphPart, OperatorGraph, TensorType
from rankdump._core.plan import ContentSettings, TensorSelection
from rankdump._core.session_protocol import KernelArguments, OperatorArguments
from rankdump._wire.frames import make_metadata_frame
from rankdump.wire.v1 import model_pb2
from rankdumpd.agent.commit import post_commit

NAMES = ["Default/b-op0", "Default/a-op0"]
PARAMETER = GraphParameter("w", TensorType("float32", (2,)))


def part(names: list[str], *, first: bool = False, last: bool = False, compiled: bool = False):
    nodes = tuple(GraphNode(name, "MatMul", ("w",)) for name in names)
    parameters = (PARAMETER,) if first else ()
    return GraphPart(OperatorGraph(0, nodes, parameters, compiled), first=first, last=last)


def events(names: list[str], iteration: int = 0) -> EventColumns:
    return EventColumns.from_events(
        [
            RankEvent(0, iteration, place, place, name, EventKind.OPERATOR, 1, 2)
            for place, name in enumerate(names)
        ]
    )


def graph_of(root: Path) -> model_pb2.GraphProto:
    path = root / "rank_0" / "graphs" / "ms_output_trace_code_graph_0.pb"
    return model_pb2.ModelProto.FromString(path.read_bytes()).graph


def names_of(root: Path) -> list[str]:
    return [node.full_name for node in graph_of(root).node]


def order_of(root: Path) -> list[str]:
    path = root / "rank_0" / "execution_order" / "ms_execution_order_graph_0.csv"
    header, *names = path.read_text().splitlines()
    assert header == "NodeExecutionOrder-FullNameWithScope"
    return names


@pytest.fixture
def rank(make_agent, make_rank):
    """A rank connected to a running agent."""
    return make_rank(make_agent().address)


class TestGraphs:
    def test_parts_are_joined_to_one_graph(self, rank, frames):
        """Both files are written with the last part, and neither before."""
        rank.open()
        stream = rank.push()
        stream.send(make_metadata_frame(1, part(NAMES[:1], first=True))).wait_acknowledged(1)
        folder = rank.root / "rank_0" / "graphs"
        assert not folder.exists()
        stream.send(make_metadata_frame(2, part(NAMES[1:], last=True)), frames.goodbye(3))
        assert stream.finish() is grpc.StatusCode.OK
        assert names_of(rank.root) == NAMES
        assert [p.name for p in graph_of(rank.root).parameters] == ["w"]
        text = (folder / "ms_output_trace_code_graph_0.ir").read_text()
        assert [name for name in NAMES if f"# Fullname with scope: ({name})" in text] == NAMES

    def test_observed_order_is_used_without_a_compiled_one(self, rank, frames):
        """Without a compiled order the file has the operators in the order in which they ran."""
        rank.open()
        stream = rank.push().send(
            make_metadata_frame(1, events(NAMES[::-1])),
            make_metadata_frame(2, part(NAMES, first=True, last=True)),
            frames.end(3, 0, 0),
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert order_of(rank.root) == NAMES[::-1]

    @pytest.mark.parametrize("graph_first", [True, False])
    def test_compiled_order_replaces_the_observed_one(self, rank, frames, graph_first):
        """The framework's own order is used, whichever of the two arrives first."""
        rank.open()
        declared = [
            part(NAMES, first=True, last=True, compiled=True),
            events(NAMES[::-1]),
        ]
        order = declared if graph_first else declared[::-1]
        stream = rank.push().send(
            *(make_metadata_frame(n + 1, each) for n, each in enumerate(order)),
            frames.end(3, 0, 0),
            make_metadata_frame(4, events(NAMES[::-1], 1)),
            frames.end(5, 1, 0),
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert order_of(rank.root) == NAMES

    def test_compiled_order_survives_a_restart(self, make_agent, make_rank, frames):
        """The next agent does not replace the compiled order by the observed one."""
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        graph = part(NAMES, first=True, last=True, compiled=True)
        rank.push().send(make_metadata_frame(1, graph)).finish()
        agent.restart()
        rank.open()
        stream = rank.push().send(
            make_metadata_frame(2, events(NAMES[::-1])), frames.end(3, 0, 0), frames.goodbye(4)
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert order_of(rank.root) == NAMES

    def test_parts_survive_a_restart_between_them(self, make_agent, make_rank, frames):
        """The first part is neither requested again nor lost."""
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        rank.push().send(make_metadata_frame(1, part(NAMES[:1], first=True))).finish()
        agent.restart()
        assert rank.open().acknowledged_sequence == 1
        stream = rank.push().send(
            make_metadata_frame(2, part(NAMES[1:], last=True)), frames.goodbye(3)
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert names_of(rank.root) == NAMES
        agent.restart()
        assert rank.status().sessions == []

    def test_grown_graph_is_written_again(self, rank, frames):
        """The files have the latest description."""
        rank.open()
        stream = rank.push().send(
            make_metadata_frame(1, part(NAMES[:1], first=True, last=True)),
            make_metadata_frame(2, part(NAMES, first=True, last=True)),
            frames.goodbye(3),
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert names_of(rank.root) == NAMES

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
    def test_unwritten_graph_is_written_at_the_next_start(
        self, make_agent, make_rank, frames, monkeypatch, code
    ):
        """A finding reports it until then; nothing else is affected."""

        def fail(*args) -> None:
            raise OSError(code, "failing on purpose")

        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        with monkeypatch.context() as patch:
            patch.setattr(post_commit.rank_files, "write_graph", fail)
            stream = rank.push().send(
                make_metadata_frame(1, part(NAMES, first=True, last=True)),
                frames.record(2, np.ones(2)),
                frames.end(3, 0, 1),
                frames.goodbye(4),
            )
            assert stream.finish() is grpc.StatusCode.OK
            (finding,) = rank.status().findings
        assert finding.startswith("rank 0, graph 0: not written: ")
        agent.restart()
        assert names_of(rank.root) == NAMES

    def test_names_in_graph_and_order_agree(self, rank, frames):
        """A name with characters that a line cannot hold is spelt the same way in both."""
        names = ["Default/a\nb-op0", "Default/\u00e9-op0"]
        rank.open()
        rank.push().send(
            make_metadata_frame(1, events(names)),
            make_metadata_frame(2, part(names, first=True, last=True)),
            frames.end(3, 0, 0),
        ).finish()
        assert order_of(rank.root) == names_of(rank.root) == ["Default/a_b-op0", names[1]]


class TestArguments:
    def test_arguments_file_is_in_its_iteration(self, rank, frames):
        """The arguments of each operator are beside its tensors, as texts."""
        values = {"stride": "(1, 1)", "bias": "False"}
        arguments = KernelArguments(
            3, (OperatorArguments(0, "Conv2d", "Default/net-Net/c.1-Conv2d/Conv2d-op0", values),)
        )
        rank.open()
        stream = rank.push().send(make_metadata_frame(1, arguments), frames.goodbye(2))
        assert stream.finish() is grpc.StatusCode.OK
        folder = rank.root / "rank_0" / "Net" / "0" / "3"
        (path,) = folder.iterdir()
        assert path.name == "Conv2d.Default_net-Net_c_1-Conv2d_Conv2d-op0.json"
        assert json.loads(path.read_text()) == values
        assert path.read_text().splitlines()[1] == '    "bias": "False",'

    def test_name_too_long_for_a_file_is_a_finding(self, rank, frames):
        """The finding is reported once, in however many iterations it occurs; the rank
        continues.
        """
        name = "Default/" + "x" * 300
        rank.open()
        stream = rank.push().send(
            *(
                make_metadata_frame(
                    n + 1, KernelArguments(n, (OperatorArguments(0, "T", name, {}),))
                )
                for n in range(3)
            ),
            frames.record(4, np.ones(2)),
            frames.end(5, 0, 1),
            frames.goodbye(6),
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert rank.status().findings == [
            f"rank 0: arguments of {name!r} not written: the file name would be over 255 bytes"
        ]


class TestNames:
    @pytest.mark.parametrize(
        ("profile", "target", "end"),
        [
            ("ms2.3", "CPU", "fc-Dense_MatMul-op0.0.0.1700000000000001.output.0.DefaultFormat.npy"),
            ("ms2.4", "CPU", ".DefaultFormat.Float32.npy"),
            ("ms2.4", "GPU", ".DefaultFormat.float32.npy"),
            (
                "ms2.0",
                "CPU",
                "/MatMul.MatMul-op0.0.0.1700000000000001.output.0.DefaultFormat.npy",
            ),
        ],
    )
    def test_profile_sets_the_spelling_of_names(
        self, make_agent, make_rank, frames, profile, target, end
    ):
        """File names follow the profile of the plan, and the metadata has its release."""
        rank = make_rank(make_agent().address, profile=profile, device_target=target, codec="none")
        rank.open()
        rank.push().send(frames.record(1, np.ones(2, dtype=np.float32))).finish()
        (path,) = (rank.root / "rank_0" / "Net").rglob("*.npy")
        assert str(path).endswith(end)
        about = json.loads((rank.root / "rank_0" / ".dump_metadata" / "config.json").read_text())
        assert about == {"device_target": target, "ms_version": f"{profile[2:]}.0"}

    def test_parameters_keep_their_dots_in_the_old_profile(self, make_agent, make_rank, frames):
        """MindSpore 2.0 finds them under these names only."""
        rank = make_rank(make_agent().address, profile="ms2.0", codec="none")
        rank.open()
        frame = frames.record(1, np.ones(2), op_name="layers.0.weight", op_type="Parameter")
        rank.push().send(frame).finish()
        (path,) = (rank.root / "rank_0" / "Net").rglob("*.npy")
        assert path.name.startswith("Parameter.layers.0.weight.0.0.")

    def test_unknown_profile_rejects_the_session(self, make_agent, make_rank):
        """The error lists the known profiles."""
        rank = make_rank(make_agent().address, profile="ms9")
        with pytest.raises(grpc.RpcError) as refused:
            rank.open()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "is not one of ms2.3, ms2.4, ms2.0" in (refused.value.details() or "")

    def test_session_without_configuration_gets_a_default_one(self, make_agent, make_rank):
        """MindInsight ignores a rank without a configuration file, so one is made from the plan."""
        rank = make_rank(make_agent().address, config_source=b"", content=ContentSettings("full"))
        rank.open()
        path = rank.root / "rank_0" / ".dump_metadata" / "data_dump.json"
        body = json.loads(path.read_text())
        assert body["common_dump_settings"]["net_name"] == "Net"
        assert body["common_dump_settings"]["saved_data"] == "full"
        assert body["e2e_dump_settings"]["enable"] is True


def test_tensor_outside_any_declared_iteration_is_stored_and_reported(
    make_agent, make_rank, frames
):
    """After an operator that raised, no iteration ends: its inputs are in the tree and reported."""
    rank = make_rank(
        make_agent().address,
        selection=TensorSelection(trigger="exception"),
        content=ContentSettings("full"),
    )
    rank.open()
    stream = rank.push().send(
        frames.record(1, np.ones(2), iteration=7),
        frames.record(2, np.ones(2), iteration=7),
        frames.goodbye(3),
    )
    assert stream.finish() is grpc.StatusCode.OK
    folder = rank.root / "rank_0" / "Net" / "0" / "7"
    assert len(list(folder.glob("*.npy*"))) == 2
    assert len((folder / "statistic.csv").read_text().splitlines()) == 3
    assert rank.status().findings == ["rank 0 ended within iteration 7, with 2 tensors in the tree"]
