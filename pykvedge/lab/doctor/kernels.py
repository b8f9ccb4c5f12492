"""Each table of libkvedge's kernels against plain loops."""

from __future__ import annotations

from collections.abc import Iterator

from pykvedge.lab.doctor.steps import Step
from pykvedge.runtime import libkvedge


def steps() -> Iterator[Step]:
    """One for each table that this processor can run."""
    for table in libkvedge.kernel_tables():
        yield Step(table, lambda at, table=table: libkvedge.check_kernels(table), part=table)
