"""Access to sessions: secrets, tokens, allowed roots, and the maximum number of sessions."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing

import grpc
import numpy as np
import pytest

Code = grpc.StatusCode
ARRAY = np.arange(6, dtype=np.float32)
SECRET = b"s" * 32


def refusal(call) -> tuple[Code, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), refused.value.details() or ""


class TestSessionSecret:
    def test_status_is_not_enough_to_take_over_a_session(self, make_agent, make_rank, frames):
        """Another local user can read every id in the status, but not the secret."""
        agent = make_agent()
        rank = make_rank(agent.address, secret=SECRET)
        rank.open()
        rank.push().send(frames.record(1, ARRAY)).wait_acknowledged(1)
        (seen,) = make_rank(agent.address).status().sessions
        thief = make_rank(
            agent.address, session_id=seen.session_id, job_id=seen.job_id, pid=seen.pid
        )
        for secret in (b"", b"t" * 32, hashlib.sha256(SECRET).digest()):
            thief.secret = secret
            code, details = refusal(thief.open)
            assert code is Code.PERMISSION_DENIED
            assert (
                details
                == "session 'session0000' was opened by another process: its secret does not match"
            )
        assert rank.open().acknowledged_sequence == 1
        assert rank.push().send(frames.goodbye(2)).finish() is Code.OK

    def test_secret_survives_a_restart(self, make_agent, make_rank, frames, short_dir, caplog):
        """The ledger has its hash; the secret itself is not on disk, in the status or in a log."""
        agent = make_agent()
        rank = make_rank(agent.address, secret=SECRET)
        rank.open()
        rank.push().send(frames.record(1, ARRAY)).wait_acknowledged(1)
        agent.restart()
        assert refusal(make_rank(agent.address, secret=b"t" * 32).open)[0] is Code.PERMISSION_DENIED
        assert rank.open().acknowledged_sequence == 1
        with closing(sqlite3.connect(short_dir / "state" / "ledger.sqlite")) as base:
            rows = base.execute("SELECT secret_hash FROM sessions").fetchall()
        assert rows == [(hashlib.sha256(SECRET).hexdigest(),)]
        written = b"".join(p.read_bytes() for p in short_dir.rglob("*") if p.is_file())
        told = (
            str(rank.status())
            + caplog.text
            + repr(agent.agent._registry.list_sessions()[0].request)
        )
        for secret in (SECRET, SECRET.hex().encode()):
            assert secret not in written
            assert secret.decode() not in told

    def test_older_client_needs_no_secret(self, make_agent, make_rank, frames):
        """It opens and resumes without one; a secret that is sent later is required from
        then on.
        """
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        rank.push().send(frames.record(1, ARRAY)).wait_acknowledged(1)
        assert rank.open().acknowledged_sequence == 1
        rank.secret = SECRET
        assert rank.open().acknowledged_sequence == 1
        rank.secret = b""
        assert refusal(rank.open)[0] is Code.PERMISSION_DENIED

    def test_token_of_another_rank_is_rejected(self, make_agent, make_rank, frames):
        """A token of an earlier opening is rejected, too."""
        agent = make_agent()
        ranks = [
            make_rank(
                agent.address, rank=n, world_size=2, session_id=f"s{n}", secret=bytes([n]) * 32
            )
            for n in range(2)
        ]
        for rank in ranks:
            rank.open()
        stream = ranks[0].push(token=ranks[1].token)
        assert stream.wait_over() is Code.PERMISSION_DENIED
        earlier = ranks[0].token
        ranks[0].open()
        assert ranks[0].push(token=earlier).wait_over() is Code.PERMISSION_DENIED
        assert ranks[0].push().send(frames.goodbye(1)).finish() is Code.OK


class TestAllowedRoots:
    def test_tree_outside_is_rejected_before_anything_is_created(
        self, make_agent, make_rank, short_dir
    ):
        """One line names the tree and the allowed folders, whatever the spelling, and for links."""
        inside, outside = short_dir / "in", short_dir / "out"
        inside.mkdir()
        outside.mkdir()
        (inside / "link").symlink_to(outside)
        agent = make_agent(roots=f"{inside}:/var/other")
        for text in (f"{outside}/a", f"{inside}/../out/a", f"{inside}/link/a", f"{inside}side"):
            code, details = refusal(make_rank(agent.address, root_text=text).open)
            assert code is Code.FAILED_PRECONDITION
            assert repr(text) in details
            assert details.endswith(f"is outside of {inside} and /var/other")
        assert list(outside.iterdir()) == []
        assert make_rank(agent.address).status().sessions == []

    @pytest.mark.parametrize("root", ["in", "in/a/b", "linked/a"])
    def test_tree_inside_is_accepted(self, make_agent, make_rank, short_dir, frames, root):
        """It is the allowed folder, one below it, or below an allowed folder that is a link."""
        (short_dir / "in").mkdir()
        (short_dir / "linked").symlink_to(short_dir / "in")
        rank = make_rank(make_agent(roots=f"{short_dir}/linked").address, root=short_dir / root)
        rank.open()
        rank.push().send(frames.record(1, ARRAY)).wait_acknowledged(1)
        assert list((short_dir / "in").rglob("*.npy*"))


class TestSessionLimit:
    def test_sessions_beyond_the_maximum_are_rejected(self, make_agent, make_rank, frames):
        """Sessions that were only opened count; a known session can be opened again."""
        agent = make_agent(max_sessions=2)
        ranks = [
            make_rank(agent.address, rank=n, world_size=3, session_id=f"s{n}") for n in range(3)
        ]
        for rank in (*ranks[:2], *ranks[:2]):
            rank.open()
        code, details = refusal(ranks[2].open)
        assert code is Code.RESOURCE_EXHAUSTED
        assert "2 sessions are open, and agent.max_sessions is 2" in details
        assert ranks[0].push().send(frames.goodbye(1)).finish() is Code.OK
        ranks[2].open()
