"""Runs a function on gloo ranks, one process each.

The ranks are forked from a server that has imported torchtitan and what else they need, since the
imports take longer than most plans. If a rank raises, the others are killed and the test shows its
traceback. Ranks that have not finished in time, as in a deadlock, are killed and fail the test.
"""

import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = "rank_server"
"""The module that the server has imported when it forks the ranks."""


def spawn(worker: Callable, ranks: int, *args, timeout: float = 400) -> None:
    """Runs `worker(rank, *args)` on each of `ranks` ranks of one process group.

    `worker` must be importable: a function at the top level of a module.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; has its traceback.
        TimeoutError: a rank had not finished after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        _start_server()
        context = mp.start_processes(
            _run_rank,
            (worker, ranks, store, timeout, args),
            nprocs=ranks,
            join=False,
            start_method="forkserver",
        )
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{worker.__name__}: ranks still run after {timeout} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def process(function: Callable, *args) -> mp.Process:
    """A process forked from the server that runs a function at the top level of a module."""
    _start_server()
    started = mp.get_context("forkserver").Process(target=function, args=args)
    started.start()
    return started


def _start_server() -> None:
    """Starts the process from which ranks are forked, unless it runs already."""
    forkserver.set_forkserver_preload([PRELOAD])
    # The server finds the modules to preload only by its PYTHONPATH.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()


def _run_rank(
    rank: int, worker: Callable, ranks: int, store: str, timeout: float, args: tuple
) -> None:
    # torchtitan and DTensor read these, as torchrun sets them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    worker(rank, *args)
    dist.destroy_process_group()
