"""Runs programs one after another, each with a time limit; what they print is seen at once and kept in a log."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

_GRACE = 5.0  # seconds between asking a program to end and making it


@dataclass
class Outcome:
    """How a part of the run has ended: ``passed``, ``failed``, ``timed out``, or why it was ``not run``."""

    name: str
    outcome: str
    seconds: float = 0.0
    details: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Runner:
    """Runs parts until a deadline.

    Args:
        log: gets all that the parts print.
        seconds: for all of them together.
    """

    def __init__(self, log: TextIO, seconds: float) -> None:
        self._log = log
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def say(self, line: str) -> None:
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()

    def run(
        self,
        name: str,
        command: list[str],
        limit: float,
        environment: dict[str, str],
        directory: Path,
        tick: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Runs ``command`` for at most ``limit`` seconds, and calls ``tick`` every second meanwhile."""
        start = time.monotonic()
        self.say(f"== {name}: {' '.join(command)}")
        if limit <= 0:
            return Outcome(name, "not run: no time left")
        try:
            process = subprocess.Popen(
                command, cwd=directory, env=os.environ | environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Outcome(name, "failed", details=str(error))
        lines: list[str] = []
        reader = threading.Thread(target=self._copy, args=(process, lines), daemon=True)
        reader.start()
        while process.poll() is None and time.monotonic() < start + limit:
            try:
                process.wait(min(1.0, max(0.0, start + limit - time.monotonic())))
            except subprocess.TimeoutExpired:
                tick()
        status = process.poll()
        _end_group(process)  # also what it may have left behind, which could hold the pipe open
        reader.join(_GRACE)
        outcome = "timed out" if status is None else "passed" if status == 0 else "failed"
        details = "" if outcome == "passed" else "\n".join(lines[-15:])
        return Outcome(name, outcome, round(time.monotonic() - start, 1), details)

    def _copy(self, process: "subprocess.Popen[str]", lines: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            self.say(lines[-1])


def _end_group(process: "subprocess.Popen[str]") -> None:
    """Ends all processes of the group that ``process`` leads: asks, and makes them if that does not help."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.05)  # for its children
