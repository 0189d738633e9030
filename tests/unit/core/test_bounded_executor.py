"""Bounded executor: the limit of bytes, oversized jobs, errors, and a caller that stops early."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankdump._core.bounded_executor import execute_bounded


def test_execute_bounded_keeps_to_the_limit_and_runs_oversized_jobs_alone():
    lock, held, most = threading.Lock(), [0], []

    def work(job: int) -> int:
        with lock:
            held[0] += job
            most.append(held[0])
        with lock:
            held[0] -= job
        return job

    jobs = [3, 4, 50, 2, 2, 9, *range(100)]
    with ThreadPoolExecutor(4) as pool:
        assert sorted(execute_bounded(pool, work, jobs, int, 10)) == sorted(jobs)
    assert all(total <= 10 or total in jobs for total in most)


def test_execute_bounded_raises_the_error_of_a_job_and_cancels_the_rest():
    begun: list[int] = []

    def work(job: int) -> int:
        begun.append(job)
        return 1 // job

    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        list(execute_bounded(pool, work, [1, 0, *range(2, 1000)], lambda job: 1, 10))
    assert len(begun) < 1000


def test_execute_bounded_cancels_jobs_when_the_caller_stops():
    first, begun = threading.Event(), list[int]()

    def work(job: int) -> int:
        begun.append(job)
        if job:
            first.wait(10)
        return job

    with ThreadPoolExecutor(1) as pool:
        results = execute_bounded(pool, work, range(100), lambda job: 1, 1000)
        assert next(results) == 0
        del results
        first.set()
    assert len(begun) <= 2
