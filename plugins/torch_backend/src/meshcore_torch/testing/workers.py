"""Worker processes that form one gloo world on this machine, started once and used many times."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, Self

from meshcore import PeerError

_MAIN = "import sys; from meshcore_torch.testing.worker import main; main(*map(eval, sys.argv[1:]))"


class WorkerError(RuntimeError):
    """A worker process ended or hung instead of answering."""


@dataclass(frozen=True)
class Outcome:
    """What one rank answered: a value, or an error with its traceback as text."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


@dataclass(frozen=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]


class GlooWorkers:
    """Processes of one torch.distributed world (gloo, one thread each); start on first use.

    Args:
        world_size: number of processes.
        timeout_seconds: how long one ``run`` may take before the workers are killed.
        grace_seconds: how long the others may take after one rank failed.

    After a hang or a death the workers are killed, and the next call starts new ones.

    >>> import os
    >>> with GlooWorkers(2) as workers:
    ...     len(set(workers.run(os.getpid)))
    2
    """

    def __init__(
        self, world_size: int, *, timeout_seconds: float = 120.0, grace_seconds: float = 45.0
    ) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.grace_seconds = grace_seconds
        self._workers: list[_Worker] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a module-level function with equal arguments on all ranks; results by rank.

        Raises:
            What the function raised, on the first rank where it is not a mere consequence
            (``PeerError``), with notes that hold its rank, its traceback, and the other errors.
            WorkerError: a worker died or hung.
        """
        outcomes = self.outcomes(function, *args)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if not failed:
            return [outcome.value for outcome in outcomes]
        first = min(failed, key=lambda outcome: isinstance(outcome.error, PeerError))
        error = first.error
        if error is None:
            raise WorkerError("unreachable: it was chosen because it has an error")
        error.add_note(f"on rank {first.rank} of {self.world_size}:\n{first.traceback}")
        for other in failed:
            if other is not first:
                error.add_note(f"on rank {other.rank}: {type(other.error).__name__}: {other.error}")
        raise error

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """As ``run``, but errors, deaths and hangs are given back by rank."""
        if not self._workers:
            self._start()
        request = pickle.dumps((list(sys.path), pickle.dumps((function, args))))
        for worker in self._workers:
            worker.connection.send_bytes(request)
        answers = self._collect()
        if any(isinstance(outcome.error, WorkerError) for outcome in answers.values()):
            self._kill()
        return [answers[rank] for rank in range(self.world_size)]

    def _collect(self) -> dict[int, Outcome]:
        answers: dict[int, Outcome] = {}
        deadline = time.monotonic() + self.timeout_seconds
        while len(answers) < self.world_size:
            pending = {
                worker.connection: rank
                for rank, worker in enumerate(self._workers)
                if rank not in answers
            }
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                answers.update(self._hung(list(pending.values())))
            for connection in ready:
                rank = next(r for c, r in pending.items() if c is connection)
                answers[rank] = self._receive(rank)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + self.grace_seconds)
        return answers

    def _receive(self, rank: int) -> Outcome:
        worker = self._workers[rank]
        try:
            return Outcome(rank, *pickle.loads(worker.connection.recv_bytes()))
        except (EOFError, ConnectionError):
            code = worker.process.wait(10)
            return Outcome(rank, error=WorkerError(f"rank {rank} ended with exit code {code}"))

    def _hung(self, ranks: list[int]) -> dict[int, Outcome]:
        for rank in ranks:  # the stacks go to the standard error of the workers
            self._workers[rank].process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        text = f"rank(s) {ranks} of {self.world_size} gave no answer in time and were killed"
        return {rank: Outcome(rank, error=WorkerError(text)) for rank in ranks}

    def _start(self) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(self.world_size):
            ours, theirs = Pipe()
            numbers = (theirs.fileno(), rank, self.world_size, self.timeout_seconds)
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, *map(repr, numbers)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
            theirs.close()
            self._workers.append(_Worker(process, ours))
        try:
            port = self._workers[0].connection.recv_bytes()
            for worker in self._workers[1:]:
                worker.connection.send_bytes(port)
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.connection.close()

    def close(self) -> None:
        """Stop the workers; idempotent, and the next call starts new ones."""
        try:
            for worker in self._workers:
                worker.connection.send_bytes(b"")
            for worker in self._workers:
                worker.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass  # what does not stop is killed below
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
