"""Load on arms that answer one job per call: so many at once, or each when it is due."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter

from paceline.bench.arms.base import Done, Job, Load, Outcome

MAX_IN_FLIGHT = 256
"""Threads of an open loop. Further jobs wait for one of them, and their times count from when they were due."""

Complete = Callable[[Job, float], Outcome]
"""Answers a job; gets the `perf_counter` value at which the pass began, from which `sent_s` and `due_s` count."""


def drive(jobs: Sequence[Job], load: Load, complete: Complete, done: Done) -> tuple[Outcome, ...]:
    """Returns the outcome of each job, in the order in which they came.

    Args:
        jobs: a closed loop takes them in order, an open loop sends each at its `due_s` by the clock.
        load: how many at once, or by the clock.
        complete: called from several threads at once. A job that fails is an outcome.
        done: told of each outcome, from the caller's thread only.

    Raises:
        ArmError, KeyboardInterrupt or whatever else `complete` or `done` raised first: no further job is begun, and
            those under way have ended. A second Ctrl-C does not wait for them.
    """
    waiting = deque(sorted(jobs, key=lambda job: job.due_s) if load.is_open else jobs)
    crew = _Crew(waiting, load.is_open, complete)
    threads = [
        Thread(target=crew.work, name=f"load-{i}", daemon=True)
        for i in range(min(len(jobs), load.concurrency or MAX_IN_FLIGHT))
    ]
    try:
        for thread in threads:
            thread.start()
        crew.begin()
        return crew.gather(len(threads), done)
    finally:
        crew.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class _Crew:
    """Threads that share one queue of jobs and hand what came of them to the caller's thread."""

    def __init__(self, waiting: deque[Job], by_clock: bool, complete: Complete) -> None:
        self._waiting, self._by_clock, self._complete = waiting, by_clock, complete
        self._results: SimpleQueue[Outcome | BaseException | None] = SimpleQueue()
        self._has_begun, self._is_stopped = Event(), Event()
        self._began = 0.0

    def begin(self) -> None:
        """Starts the clock, once every thread is there."""
        self._began = perf_counter()
        self._has_begun.set()

    def stop(self) -> None:
        """Lets every thread end behind the job it is at."""
        self._is_stopped.set()
        self._has_begun.set()

    def gather(self, num_threads: int, done: Done) -> tuple[Outcome, ...]:
        """Returns all outcomes once the threads have ended, or raises what the first of them raised."""
        outcomes: list[Outcome] = []
        error: BaseException | None = None
        while num_threads:
            result = self._results.get()
            if result is None:
                num_threads -= 1
            elif isinstance(result, BaseException):
                self.stop()
                error = error or result
            else:
                outcomes.append(result)
                done(result)
        if error is not None:
            raise error
        return tuple(outcomes)

    def work(self) -> None:
        """Takes jobs until none is left; an exception becomes a result and ends everything."""
        self._has_begun.wait()
        try:
            while not self._is_stopped.is_set():
                try:
                    job = self._waiting.popleft()
                except IndexError:
                    break
                if self._by_clock and self._is_stopped.wait(
                    max(0.0, self._began + job.due_s - perf_counter())
                ):
                    break
                self._results.put(self._complete(job, self._began))
        except BaseException as error:  # KeyboardInterrupt too: it belongs to the caller's thread
            self._results.put(error)
        finally:
            self._results.put(None)
