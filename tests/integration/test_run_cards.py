"""Run cards on their way from the end of an iteration into its manifest, in every layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

import grpc
import numpy as np
import pytest

import rankdump
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._analysis.reader.dump import Dump
from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings
from rankdump._core.run_card import MAX_CARD_BYTES, RunCard, format_card
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump.wire.v1 import agent_pb2
from rankdumpd.rebuild import rebuild_ledger

CARD = RunCard(command=("python", "train.py"), digests={"batch.0": "0f"})
OUTPUTS = {
    "npy": {},
    "bin": {"layout": "mindspore-async", "file_format": "bin"},
    "cann": {"layout": "cann", "file_format": "bin", "started": "20261127101112"},
    "api": {"layout": "api-torch"},
}


def end(frames, sequence: int, iteration: int, card: bytes) -> agent_pb2.Frame:
    frame = frames.end(sequence, iteration, 1)
    frame.iteration_end.card = card
    return frame


def send(rank, frames, cards: list[bytes]) -> None:
    sent = []
    for iteration, card in enumerate(cards):
        array = np.arange(6, dtype=np.float32) + iteration
        sequence = 2 * iteration + 1
        sent += [
            frames.record(sequence, array, iteration=iteration, op_name="Default/a/X-op0"),
            end(frames, sequence + 1, iteration, card),
        ]
    stream = rank.push().send(*sent, frames.goodbye(2 * len(cards) + 1))
    assert stream.finish() is grpc.StatusCode.OK


@pytest.mark.parametrize("name", OUTPUTS)
def test_card_is_in_the_manifest_of_every_layout(make_agent, make_rank, frames, name):
    """Also one of a later release, as a whole; and none where the rank sends none."""
    assert OUTPUTS[name].get("layout", "mindspore-sync") in LAYOUTS
    # A tree of an API dump has statistics as well.
    content = ContentSettings("full", ("max",)) if name == "api" else ContentSettings()
    rank = make_rank(make_agent().address, output=OUTPUTS[name], content=content)
    rank.open()
    later = json.loads(format_card(CARD)) | {"weather": "fine"}
    send(rank, frames, [format_card(CARD), json.dumps(later).encode(), b""])
    dump = rankdump.open(rank.root)
    assert [(each.iteration, each.card) for each in dump.cards] == [(0, CARD), (1, CARD)]
    (path,) = rank.root.glob("rank*/.dump_metadata/manifest/iteration_1.*.json")
    assert json.loads(path.read_bytes())["card"] == later
    assert check_tree(rank.root, workers=1).damages == ()


@pytest.mark.parametrize(
    "card", [b"\xff", b"[]", b"{}", b"[" * 50_000, b'{"version": 1}' + b" " * MAX_CARD_BYTES]
)
def test_damaged_card_costs_the_iteration_nothing(make_agent, make_rank, frames, card):
    rank = make_rank(make_agent().address)
    rank.open()
    send(rank, frames, [card, card])
    (finding,) = [each for each in rank.status().findings if "run card" in each]
    assert finding.startswith("rank 0, a run card is left out: run card ")
    dump = rankdump.open(rank.root)
    assert (dump.cards, dump.card_problems, dump.iterations) == ((), (), (0, 1))


def test_cards_outlive_the_ledger(make_agent, make_rank, frames, short_dir):
    agent = make_agent()
    rank = make_rank(agent.address)
    rank.open()
    send(rank, frames, [format_card(CARD)])
    agent.stop()
    state = short_dir / "again"
    rebuild_ledger(rank.root, state)
    assert [each.card for each in rankdump.open(rank.root).cards] == [CARD]
    assert check_tree(rank.root, workers=1).damages == ()


def run_arrays(root: Path, address: str, *, card: bool = True) -> Dump:
    plan = DumpPlan(OutputSettings(str(root)), content=ContentSettings(run_card=card))
    with rankdump.Session(plan, agent=address) as session:
        for iteration in range(2):
            random.seed(iteration)
            np.random.seed(0)
            session.step(iteration)
            session.dump("Add", "Default/network-Net/add-Add/Add-op0", "output", 0, np.ones(3))
            session.note(loss=0.5)
    return rankdump.open(root)


def test_job_with_plain_arrays_has_cards(make_agent, short_dir):
    """Process, generators and what the script notes; there is no model."""
    cards = run_arrays(short_dir / "dump", make_agent().address).cards
    assert [each.iteration for each in cards] == [0, 1]
    first, second = (each.card for each in cards)
    assert first.versions["numpy"] == np.__version__
    assert first.command
    assert first.numbers == {"loss": "0.5"}
    assert first.digests["random.python"] != second.digests["random.python"]
    assert first.digests["random.numpy"] == second.digests["random.numpy"]
    assert (first.models, first.parameters) == ((), {})


def test_cards_can_be_switched_off(make_agent, short_dir):
    dump = run_arrays(short_dir / "dump", make_agent().address, card=False)
    assert (dump.cards, dump.found_cards.without) == ((), 2)
