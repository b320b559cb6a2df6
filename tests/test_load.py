"""The driver of one-job-at-a-time arms: how many at once, when, and what happens when something ends."""

from __future__ import annotations

import threading
from time import perf_counter, sleep

import pytest

from paceline.bench.arms.base import ArmError, Job, Load, Outcome
from paceline.bench.runs import load as load_module
from paceline.bench.runs.load import drive
from paceline.core.params import SamplingParams

PATIENCE_S = 10.0  # of a barrier that is never whole in a wrong driver


def jobs(*due_s: float) -> list[Job]:
    return [Job(f"job-{i}", [], SamplingParams(), due) for i, due in enumerate(due_s)]


def ignore(outcome: Outcome) -> None:
    pass


class Counter:
    """Counts calls under way."""

    def __init__(self) -> None:
        self.now, self.most, self._lock = 0, 0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.now -= 1


def num_load_threads() -> int:
    return sum(thread.name.startswith("load-") for thread in threading.enumerate())


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_so_many_in_flight(concurrency: int) -> None:
    counter, together = Counter(), threading.Barrier(concurrency)

    def complete(job: Job, began: float) -> Outcome:
        with counter:
            together.wait(PATIENCE_S)  # passes only when `concurrency` calls are under way
        return Outcome(job.id)

    outcomes = drive(jobs(*[0.0] * 6), Load(concurrency), complete, ignore)
    assert counter.most == concurrency
    assert sorted(outcome.id for outcome in outcomes) == [f"job-{i}" for i in range(6)]


def test_a_closed_loop_takes_jobs_in_order_and_does_not_look_at_due_times() -> None:
    taken: list[str] = []

    def complete(job: Job, began: float) -> Outcome:
        taken.append(job.id)
        return Outcome(job.id)

    drive(jobs(1e6, 3.0, 0.0), Load(1), complete, ignore)
    assert taken == ["job-0", "job-1", "job-2"]


def test_an_open_loop_sends_when_due_whether_or_not_others_are_answered() -> None:
    due_s, sent_s = (0.06, 0.0, 0.03), dict[str, float]()
    together = threading.Barrier(3)

    def complete(job: Job, began: float) -> Outcome:
        sent_s[job.id] = perf_counter() - began
        together.wait(PATIENCE_S)  # none is answered before the last is sent
        return Outcome(job.id)

    drive(jobs(*due_s), Load(rate_per_s=1.0), complete, ignore)
    assert all(sent_s[f"job-{i}"] >= due for i, due in enumerate(due_s))
    assert sorted(sent_s, key=sent_s.__getitem__) == ["job-1", "job-2", "job-0"]


def test_an_open_loop_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MAX_IN_FLIGHT", 2)
    counter = Counter()

    def complete(job: Job, began: float) -> Outcome:
        with counter:
            sleep(0.002)
        return Outcome(job.id)

    assert len(drive(jobs(*[0.0] * 7), Load(speed=1.0), complete, ignore)) == 7
    assert counter.most == 2


def test_a_full_open_loop_takes_jobs_in_the_order_in_which_they_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_module, "MAX_IN_FLIGHT", 1)
    outcomes = drive(jobs(0.02, 0.0, 0.01), Load(rate_per_s=1.0), lambda job, began: Outcome(job.id), ignore)
    assert [outcome.id for outcome in outcomes] == ["job-1", "job-2", "job-0"]


def test_no_jobs_is_no_work() -> None:
    assert drive([], Load(4), lambda job, began: Outcome(job.id), ignore) == ()


def test_outcomes_are_told_in_the_caller_s_thread() -> None:
    told: list[tuple[str, int]] = []
    outcomes = drive(
        jobs(*[0.0] * 5),
        Load(2),
        lambda job, began: Outcome(job.id),
        lambda outcome: told.append((outcome.id, threading.get_ident())),
    )
    assert [id for id, _ in told] == [outcome.id for outcome in outcomes]
    assert {thread for _, thread in told} == {threading.get_ident()}


@pytest.mark.parametrize("error", [ArmError("gone"), KeyboardInterrupt(), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("load", [Load(2), Load(rate_per_s=1.0)])
def test_an_exception_ends_everything(error: BaseException, load: Load) -> None:
    begun: list[str] = []
    ended: list[str] = []
    second_is_there = threading.Event()

    def complete(job: Job, began: float) -> Outcome:
        begun.append(job.id)
        if job.id == "job-0":
            second_is_there.wait(PATIENCE_S)
            raise error
        second_is_there.set()
        sleep(0.05)
        ended.append(job.id)
        return Outcome(job.id)

    before = perf_counter()
    with pytest.raises(type(error)):
        drive(jobs(0.0, 0.0, 1000.0, 1000.0), load, complete, ignore)
    assert perf_counter() - before < 500.0, "waited for jobs that it should not begin"
    assert set(begun) <= {"job-0", "job-1", "job-2"}
    assert "job-1" in ended, "left before a call under way had ended"
    assert num_load_threads() == 0


def test_ctrl_c_in_the_caller_s_thread_ends_everything() -> None:
    begun: list[str] = []

    def complete(job: Job, began: float) -> Outcome:
        begun.append(job.id)
        sleep(0.002)
        return Outcome(job.id)

    def done(outcome: Outcome) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(jobs(*[0.0] * 2000), Load(2), complete, done)
    assert len(begun) < 2000
    assert num_load_threads() == 0
