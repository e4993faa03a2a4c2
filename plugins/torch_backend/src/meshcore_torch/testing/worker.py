"""What runs inside a worker process: join a gloo world, then run what is sent to it."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def main(fd: int, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Serve requests that arrive over an inherited connection.

    Args:
        fd: file descriptor of this end of the connection.
        rank: rank of this process.
        world_size: number of workers.
        timeout_seconds: of the default process group.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(fd)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_seconds)
    host, tcp_store = "127.0.0.1", dist.TCPStore  # type: ignore[attr-defined]  # not in __all__
    if rank == 0:  # the store takes a free port, and the others are told which
        store = tcp_store(host, 0, world_size, True, timeout, wait_for_workers=False)
        connection.send_bytes(str(store.port).encode())
    else:
        port = int(connection.recv_bytes().decode())
        store = tcp_store(host, port, world_size, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:  # whoever started us is gone
            return
        if not request:
            break
        connection.send_bytes(_answer(request))
    dist.destroy_process_group()
    connection.close()
    os._exit(0)  # nothing is left to do, and to unload torch takes as long as to load it


def _answer(request: bytes) -> bytes:
    """Run one request: (value, None, "") or (None, error, traceback), pickled."""
    try:
        path, call = pickle.loads(request)
        sys.path[:] = path  # the function may be in a test that was found since we started
        function, args = pickle.loads(call)
        return pickle.dumps((function(*args), None, ""))
    except BaseException as error:
        text = traceback.format_exc()
        return pickle.dumps((None, _picklable(error), text))


def _picklable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot be sent."""
    sent: Any
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:
        sent = None
    if type(sent) is type(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
