"""300 mutants of each kind of file that kvedge reads, from a seed: scripts/fuzz_files.py makes as many as one likes."""

from __future__ import annotations

import sys

import pytest
from fuzz_files import MOST_KIB, fuzz, originals
from fuzz_mutants import MAKERS, mutant

CASES = 300
MANY_RUN = ("model", "mmproj", "plan")  # a file that is damaged in what does not matter is as good as before

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits a worker as Linux does")


@pytest.fixture(scope="module")
def folder(native, tmp_path_factory):
    made = tmp_path_factory.mktemp("fuzz")
    originals(made)
    return made


@pytest.mark.parametrize("kind", MAKERS)
def test_mutants_are_answered_with_or_refused(folder, environment, kind):
    found = fuzz(kind, CASES, 1, folder, environment)
    assert not found.failures, found.failures
    assert found.counts["refused"] > CASES // 10 and sum(found.counts.values()) == CASES
    assert found.counts["ran"] > (CASES // 10 if kind in MANY_RUN else 0)
    assert found.most_kib < MOST_KIB


def test_a_mutant_is_made_again_from_its_number(folder):
    for kind in MAKERS:
        data = (folder / kind).read_bytes()
        mutants = [mutant(kind, data, 7, i) for i in range(20)]
        assert mutants == [mutant(kind, data, 7, i) for i in range(20)] and len(set(mutants)) > 15
