"""Trains in several processes of one thread each, and averages their gradients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def parser_of(about: str | None, vision_steps: int, text_steps: int, samples: int) -> ArgumentParser:
    """Returns the parser of a training program, with these defaults."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of checkpoints, log and GGUF files")
    parser.add_argument("--workers", type=int, default=2, help="single-thread processes")
    parser.add_argument("--vision-steps", type=int, default=vision_steps)
    parser.add_argument("--text-steps", type=int, default=text_steps)
    parser.add_argument("--samples", type=int, default=samples, help="held-out samples per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help=SUPPRESS)
    parser.add_argument("--store", default="", help=SUPPRESS)
    return parser


def in_workers(args: Namespace, train: Callable[[], object]) -> None:
    """Runs `train` here and, from rank 0, in args.workers - 1 more processes with the same command line.

    args: has out, workers, rank and store; rank and store are as the process got them.
    """
    others: list[subprocess.Popen] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the other processes end with this one
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
