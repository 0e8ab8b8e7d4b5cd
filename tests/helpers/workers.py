"""Rank processes that live for the whole test session and run one function after another."""

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """A rank raised, died or did not answer."""


def fork_context() -> Any:
    """Returns a multiprocessing context with torch already imported in new processes, which saves seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch._inductor.compile_fx"])
    return context


def join_job(store: str, rank: int, world_size: int, seconds: float = 1800.0) -> None:
    """Starts a job over gloo, by default with torch's timeout of 30 minutes. ``store`` is a file or an address."""
    if dist.is_initialized():
        dist.destroy_process_group()
    options: Any = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=seconds)}
    dist.init_process_group("gloo", init_method=store if "://" in store else f"file://{store}", **options)


def start_ranks(store: Path, function: Callable[..., None], size: int, *args: Any) -> tuple[list[Any], Any]:
    """Starts a process for each rank, which calls ``function(str(store), rank, size, *args, answers)``.

    Returns the processes, and ``answers``, a queue.
    """
    context = fork_context()
    answers = context.Queue()
    ranks = [context.Process(target=function, args=(str(store), rank, size, *args, answers)) for rank in range(size)]
    for process in ranks:
        process.start()
    return ranks, answers


class WorkerPool:
    """Runs functions on ranks.

    Args:
        join: called on each rank before its first function in a job, with a file for a store, rank and world size.
        environment: environment variables of the ranks.
    """

    def __init__(self, join: Callable[[str, int, int], None] = join_job, **environment: str) -> None:
        self._join = join
        self._environment = environment
        self._context = fork_context()
        self._directory = Path(tempfile.mkdtemp(prefix="bagua_syncbn_ranks_"))
        self._stores = itertools.count()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store = ""
        self._world_size = 0

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300) -> list[Any]:
        """Calls ``function(*args)``, pickled by name, on each rank; returns the results in rank order.

        If a rank raises, dies or does not answer, kills all ranks and raises a :class:`RankError` with its traceback.
        The next call starts new processes.
        """
        self._start(world_size)
        if world_size != self._world_size:
            self._world_size = world_size
            self._store = str(self._directory / f"store{next(self._stores)}")
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        job = pickle.dumps((function, args, self._store, world_size, test))
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(job)
        try:
            return self._collect(set(range(world_size)), timeout)
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
            arguments = rank, theirs, str(self._stacks(rank)), self._join, self._environment
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in new:  # imports do not count toward the timeout of the function
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


class Patched:
    """A pool whose ranks replace an attribute of this package while they run a function."""

    def __init__(self, pool: WorkerPool, name: str, value: Any) -> None:
        self._pool, self._patch = pool, (f"bagua_syncbn.{name}", value)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        return self._pool.run(_run_patched, world_size, self._patch, function, *args, **options)


def _run_patched(attribute: tuple[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    with patch(*attribute):
        return function(*args)


def summing(pool: WorkerPool) -> Patched:
    """Returns the pool, with groups that sum statistics in float64 instead of gathering them, like large groups."""
    return Patched(pool, "communicators.c10d.FEWEST_SUMMED", 2)


def _serve(
    rank: int, pipe: Connection, stacks: str, join: Callable[[str, int, int], None], environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # before the first function imports bagua_syncbn
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    # A rank that leaves a job early would close connections that peers are still opening.
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


def run_fresh(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` as a program in a new process with torch already imported, which is faster than a new
    interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        process = fork_context().Process(target=_run, args=(code, arguments, environment, files))
        process.start()
        process.join()
        stdout, stderr = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(code, process.exitcode or 0, stdout, stderr)


def _run(code: str, arguments: tuple[str, ...], environment: dict[str, str], files: list[str]) -> None:
    for stream, file in zip((sys.stdout, sys.stderr), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


@contextmanager
def launched_by_torchrun(**environment: str) -> Iterator[None]:
    """Ends this rank's job; inside the context, the environment is set as by torchrun on this host, without a port."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": ""}
    with patch.dict(os.environ, environment):
        yield


def forget_compilations() -> None:
    """Resets torch.compile: its limit of recompilations includes earlier tests."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
