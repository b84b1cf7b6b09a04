"""Two real processes that talk through gloo, started from a server that has imported everything once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["processes_preload"])


def start_server() -> None:
    """Once: the server finds what it is to import by PYTHONPATH alone, and says nothing when it doesn't."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What accelerate launch and torchrun tell a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


def run_in(count: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 240, **variables: str) -> list[Any]:
    """``function(*args)`` in so many processes; what each returned, by rank. Fails when one fails or the time is up; none is left behind.

    Args:
        count: 1 for a process that knows of no others.
        function: Of a module, so that it can be found by its name.
        variables: More of the environment.
    """
    start_server()
    port = free_port()
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(count)]
    processes = [
        CONTEXT.Process(
            target=_child,
            args=(
                pipes[rank][1],
                {**(environment(rank, count, port) if count > 1 else {"ACCELERATE_USE_CPU": "true"}), **variables},
                function,
                args,
            ),
            daemon=True,
        )
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for _, sending in pipes:
        sending.close()
    results: list[Any] = [None] * count
    waiting = {pipes[rank][0]: rank for rank in range(count)}
    try:
        while waiting:
            ready = wait(list(waiting), timeout_seconds)
            assert ready, f"no answer within {timeout_seconds} s from process {sorted(waiting.values())}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                good, results[rank] = pickle.loads(pipe.recv_bytes())
                assert good, f"process {rank}:\n{results[rank]}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def _child(pipe: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    try:
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))  # plain pickle: tensors by value, not as memory that ends with this process
