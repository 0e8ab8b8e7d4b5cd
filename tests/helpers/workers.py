"""Rank processes that live for the whole test session and run one function after another.

``pool.run(function, world_size, *args)`` calls ``function(*args)`` on each rank of a gloo job of ``world_size`` and
returns their results in rank order. ``function`` is pickled by name.

If a rank raises, dies or does not answer, all ranks are killed and :class:`RankError` shows its traceback. The next
call starts new processes.
"""

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """A rank raised, died or did not answer."""


class WorkerPool:
    """Args:
    join: called on each rank, with a file for a store, rank and world size, before its first function in a job.
    """

    def __init__(self, join: Callable[[str, int, int], None] | None = None) -> None:
        self._join = join or join_job
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo"])  # seconds, for each rank
        self._directory = Path(tempfile.mkdtemp(prefix="bagua_syncbn_ranks_"))
        self._stores = itertools.count()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store = self._directory / "none"
        self._world_size = 0

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300) -> list[Any]:
        self._start(world_size)
        if world_size != self._world_size:
            self._world_size = world_size
            self._store = self._directory / f"store{next(self._stores)}"
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        job = pickle.dumps((function, args, str(self._store), world_size, test))
        ranks = range(world_size)
        for rank in ranks:
            self._pipes[rank].send_bytes(job)
        try:
            return self._collect(set(ranks), timeout)
        except RankError:
            self.close()
            raise

    def forget_job(self) -> None:
        """Makes the next call start a new job in the same processes."""
        self._world_size = 0

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._world_size = [], [], 0

    def _start(self, world_size: int) -> None:
        new = range(len(self._processes), world_size)
        for rank in new:
            ours, theirs = self._context.Pipe()
            arguments = rank, theirs, str(self._stacks(rank)), self._join
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in new:  # imports do not count toward the time-out of the function
            self._pipes[rank].recv_bytes()

    def _collect(self, waiting: set[int], timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait([self._pipes[rank] for rank in waiting], deadline - time.monotonic())
            if not ready:
                raise RankError(f"no answer within {timeout:g} s{self._dump_stacks(waiting)}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join()
                    exitcode = self._processes[rank].exitcode
                    last = self._stacks(rank).read_text()
                    raise RankError(f"rank {rank} died with exit code {exitcode}\n{last}") from None
                if not succeeded:
                    raise RankError(f"rank {rank} raised\n{value}")
                waiting.remove(rank)
                results[rank] = value
        return [results[rank] for rank in sorted(results)]

    def _dump_stacks(self, ranks: set[int]) -> str:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "".join(f"\nrank {rank} waits at\n{self._stacks(rank).read_text()}" for rank in sorted(ranks))

    def _stacks(self, rank: int) -> Path:
        return self._directory / f"stacks{rank}"


def _serve(rank: int, pipe: Connection, stacks: str, join: Callable[[str, int, int], None]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background of a shell ignore
    # A rank that leaves a job early would close connections that other ranks are still opening.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    current = current_test = ""
    with Path(stacks).open("w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, stacks_file)
        faulthandler.enable(stacks_file)
        pipe.send_bytes(b"ready")
        while True:
            try:
                function, args, store, world_size, test = pickle.loads(pipe.recv_bytes())
                if test != current_test:
                    forget_compilations()
                    current_test = test
                if store != current:
                    join(store, rank, world_size)
                    current = store
                answer = True, function(*args)
            except EOFError:  # the session ended
                return
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))


def forget_compilations() -> None:
    """Resets torch.compile, whose limit of recompilations counts earlier tests."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def join_job(store: str, rank: int, world_size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
