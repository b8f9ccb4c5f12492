"""scripts/mutants.py: its changes, its choice of tests, and its report of a change that a test notices."""

from __future__ import annotations

from conftest import ROOT
from mutant_sites import compiles, sites
from mutants import Runner, drawn, likely_tests, made

SOURCE = '''"""What 1 + 1 < 3 is."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import os
LIMIT: int = 3
def f(a: int = 1, *, b=False) -> list[2]:
    """Not 5."""
    if not a or (a) < b and b is not None:
        g(a, b, *c)
        g(a, (b), "\u00e9")
    return g(f"{a == b}")[-1]
'''


def test_changes_are_other_programs():
    found = [(site.kind, site.line, site.applied(SOURCE).splitlines()[site.line - 1].strip()) for site in sites(SOURCE)]
    assert found == [
        ("constant", 5, "LIMIT: int = 4"),
        ("constant", 6, "def f(a: int = 2, *, b=False) -> list[2]:"),
        ("constant", 6, "def f(a: int = 1, *, b=True) -> list[2]:"),
        ("boolean", 8, "if bool(a) or (a) < b and b is not None:"),
        ("boolean", 8, "if not a and (a) < b and b is not None:"),
        ("comparison", 8, "if not a or (a) <= b and b is not None:"),
        ("boolean", 8, "if not a or (a) < b or b is not None:"),
        ("comparison", 8, "if not a or (a) < b and b is None:"),
        ("dropped call", 9, "pass"),
        ("dropped call", 10, "pass"),
        ("swapped arguments", 10, 'g(b, (a), "\u00e9")'),
        ("swapped arguments", 10, 'g(a, ("\u00e9"), b)'),
        ("return", 11, "return None"),
        ("constant", 11, 'return g(f"{a == b}")[-2]'),
    ]
    assert all(compiles(site.applied(SOURCE)) for site in sites(SOURCE)) and not compiles("def f(")


def test_the_nearest_tests_come_first():
    assert "tests/test_hub.py" in likely_tests("pykvedge/models/hub/folders.py", ("Folder", "commits"))[:2]
    assert likely_tests("pykvedge/runtime/sessionlock.py", ("remove_leftovers",))[0] == "tests/test_session_lock.py"
    assert "tests/test_calibrate.py" in likely_tests("kvedge_lab/commands/calibrate.py", ("_deliver",))[:3]
    assert all((ROOT / test).is_file() for test in likely_tests("pykvedge/errors.py", ()))


def test_the_same_seed_draws_the_same_changes():
    shares = ROOT / "pykvedge" / "reference" / "stages" / "shares.py"
    first, again, other = ([m.patch for m in drawn([shares], seed, 5)] for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == 5
    assert all(patch.startswith("--- a/pykvedge/reference/stages/shares.py\n+++ b/") for patch in first)


def test_a_change_that_a_test_notices_is_killed_and_no_file_is_touched(tmp_path):
    path = "pykvedge/reference/stages/shares.py"
    source, runner = (ROOT / path).read_text(encoding="utf-8"), Runner(tmp_path, 300)
    [least] = [site for site in sites(source) if "most: int, least: int = 1" in site.applied(source)]
    noticed = "tests/test_budgets.py::test_shares_become_whole_numbers"
    changed = made(path, source, least)
    assert runner.fails(noticed, changed).startswith(noticed)
    assert runner.fails("tests/test_budgets.py::test_settings_that_do_not_exist_or_do_not_fit", changed) == ""
    assert (ROOT / path).read_text(encoding="utf-8") == source
