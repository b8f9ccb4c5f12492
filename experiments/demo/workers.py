"""Training in several processes of one thread each, whose gradients are averaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def in_workers(args: Namespace, train: Callable[[], object]) -> None:
    """Runs `train` here and, from rank 0, in args.workers - 1 more processes with the same command line.

    args: has out, workers, rank and store, the last two as the processes were given them.
    """
    others: list[subprocess.Popen] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the others end with this one
    if args.rank == 0 and args.workers > 1:
        args.store = str((args.out / f"store-{os.getpid()}").resolve())
        command = [sys.executable, *sys.argv, "--store", args.store]
        others = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(1, args.workers)]
    if args.workers > 1:
        where = f"file://{args.store}"
        dist.init_process_group("gloo", where, timedelta(days=1), rank=args.rank, world_size=args.workers)
    try:
        train()
        if args.workers > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        for process in others:
            process.kill()
        raise
    for process in others:
        process.wait()
    if others:
        Path(args.store).unlink(missing_ok=True)
