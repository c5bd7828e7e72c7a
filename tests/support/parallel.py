"""Ranks as real processes: one group on this machine, gone when the call returns."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rushes_worker.parallel import SequenceParallel
from support.forked import preload
from torch.multiprocessing import start_processes

preload("torch", "rushes_worker.pipeline.fasth3")


def run_ranks(
    body: Callable[..., Any], size: int, *arguments: Any, device: str = "cpu", timeout_seconds: float = 240
) -> list[Any]:
    """Call `body(parallel, *arguments)` in `size` fresh processes, on the CPU with gloo or on a GPU each with NCCL.

    `body` lives in a module under tests/support, so that the processes can import it.

    Returns:
        What the ranks returned, by rank.

    Raises:
        Exception: a rank raised or died; the others are killed at once.
        TimeoutError: the ranks did not end in time; all are killed.
    """
    # what holds a GPU must not be a fork
    start_method = "spawn" if device == "cuda" else "forkserver"
    with tempfile.TemporaryDirectory() as folder:
        # each tensor would be a file descriptor, of which a fork can be given few
        torch.save(arguments, Path(folder, "arguments.pt"))
        context = start_processes(
            _rank, (body, size, device, folder), nprocs=size, join=False, start_method=start_method
        )
        deadline = time.monotonic() + timeout_seconds
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{size} ranks of {body.__name__} still run after {timeout_seconds} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(size)]


def _rank(rank: int, body: Callable[..., Any], size: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    arguments = torch.load(Path(folder, "arguments.pt"), weights_only=False)
    parallel = SequenceParallel.connect(rank, size, device, init_method=f"file://{folder}/rendezvous")
    with torch.inference_mode():
        result = body(parallel, *arguments)
    torch.save(result, Path(folder, f"{rank}.pt"))
    # a rank that leaves while another still talks to it would look like a failure
    dist.barrier()
    if parallel.device.type == "cuda":
        # NCCL waits for ever for graphs of its work that are not collected yet
        torch.cuda.synchronize()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    dist.destroy_process_group()
