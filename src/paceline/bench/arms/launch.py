"""A server that is started for a benchmark: its processes, log and memory, and that nothing of it is left behind."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

from paceline.bench.arms.base import ArmError

LOG_LINES, LOG_BYTES = 20, 16384
"""How much of a log is shown."""
STOP_S = 10.0
"""How long a server may take to stop before it is killed, and then to vanish."""

_HAS_PROC = sys.platform == "linux"


def refuse_if_taken(url: str) -> None:
    """Refuses an address where something listens already: it would be measured in place of the server to be started.

    Raises:
        ArmError: something does.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError), socket.create_connection((str(parts.hostname), port), timeout=2):
        raise ArmError(
            f"{url}: expected nobody there before the server is started, but something answers already; "
            "hint: stop it, give the server another port, or use an arm of kind url"
        )


class Launched:
    """A server and all processes that it starts in turn; they share a session of their own.

    Ctrl-C does not reach it. It ends with `stop`, or when this process exits.

    Args:
        words: the command line, split.

    Raises:
        ArmError: there is no such program, or it may not be run.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.log = Path(tempfile.mkdtemp(prefix="paceline-server-")) / "server.log"
        self._is_log_needed = False
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self.log.parent)
            raise ArmError(f"{words[0]}: cannot be started ({error})") from error
        atexit.register(self.stop)

    def exit_code(self, within_s: float = 0.0) -> int | None:
        """Returns with which code the server ended, `None` if it still runs after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return None

    def last_words(self) -> str:
        """Returns where the log is and how it ends. The log is then kept when the server stops."""
        self._is_log_needed = True
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
        return f"the end of its log, {self.log}:\n" + "\n".join(lines or ["(empty)"])

    def reset_peak(self) -> None:
        """Lets `peak_memory_bytes` begin again, where the kernel allows it; else it counts from the start."""
        for pid in self._members():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # see proc(5): forgets the peak resident size

    def peak_memory_bytes(self) -> int | None:
        """Returns the most main memory that each process held since the last reset, summed; pages that are shared count
        in each. `None` where there is no /proc."""
        peaks = [_peak_bytes(pid) for pid in self._members()] if _HAS_PROC else []
        return sum(peaks) or None

    def stop(self) -> None:
        """Ends all its processes, by request and after `STOP_S` by force; harmless when stopped."""
        try:
            self._signal(signal.SIGTERM)
            self._wait()
        finally:
            self._signal(signal.SIGKILL)
            self._wait()
            atexit.unregister(self.stop)
            if not self._is_log_needed:
                shutil.rmtree(self.log.parent, ignore_errors=True)

    def _wait(self) -> None:
        """Returns once no process is left, or after `STOP_S`."""
        deadline = monotonic() + STOP_S
        while (self.exit_code() is None or any(self._members())) and monotonic() < deadline:
            sleep(0.02)

    def _signal(self, number: signal.Signals) -> None:
        """Signals the process group, and what left it for a group of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        for pid in self._members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _members(self) -> Iterator[int]:
        """Yields the living processes of the session; none where there is no /proc."""
        for path in Path("/proc").glob("[0-9]*/stat") if _HAS_PROC else ():
            with suppress(OSError):  # it ended meanwhile
                state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
                if int(session) == self._process.pid and state != "Z":
                    yield int(path.parent.name)


def _peak_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
