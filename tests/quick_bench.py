"""kvedge, but bench reads memory for a moment alone: how fast that is read is tested in test_bench_machine.py."""

from kvedge_lab.bench import machine
from pykvedge.cli import program

machine.SETS, machine.ATTEMPTS = (1 << 20,), 1
program.main()
