"""Runs kvedge, but `bench` samples memory only briefly: test_bench_machine.py tests the sampling."""

from kvedge_lab.bench import machine
from pykvedge.cli import program

machine.SETS, machine.ATTEMPTS = (1 << 20,), 1
program.main()
