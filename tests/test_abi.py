"""Checks that every function of kvedge.h is defined, and that no exception can leave it."""

import re

from conftest import ROOT

from pykvedge.native import abi


def declared() -> set[str]:
    """Returns the names of the functions in the headers."""
    headers = "\n".join(path.read_text() for path in (ROOT / "native" / "include").glob("*.h"))
    return set(re.findall(r"^KVEDGE_API [^;(]*\b(kvedge_\w+)\(", headers, re.MULTILINE))


# a checked function may look at its arguments, then must only call a noexcept template, for example of glue/calls.h
LOOK = r"(?:    const char \* missing = [^\n]*\n|    if \(!kv\) \{\n        return 0;\n    \}\n)?"
NOEXCEPT = rf"\) \{{\n{LOOK}    return (?:claimed|in_context|asked|of_head)\(.*\);\n\}}$"


def definitions() -> dict[str, str]:
    """Returns the functions of native/src with C linkage: {name: signature and body}."""
    found = {}
    for path in (ROOT / "native" / "src").rglob("*.cpp"):
        for text in re.split(r'^extern "C" ', path.read_text(), flags=re.MULTILINE)[1:]:
            lines = text.splitlines()
            one = lines[0].endswith("}")
            code = lines[0] if one else text[: re.search(r"^\}$", text, re.MULTILINE).end()]
            found[re.search(r"\b(kvedge_\w+)\(", code)[1]] = code
    return found


def test_every_export_catches_what_is_thrown():
    found = definitions()
    assert set(found) == declared() and len(found) > 50
    for name, code in found.items():
        caught = re.search(r"\) try \{.*\} catch \(\.\.\.\) \{.*\}$", code, re.DOTALL)
        if re.search(NOEXCEPT, code, re.DOTALL):
            continue
        assert caught, f"{name} lets exceptions through"
        assert code.count("} catch (") == 1 or name == "kvedge_load_backends", f"{name} catches twice"


def test_the_python_package_asks_for_the_version_of_the_header():
    header = (ROOT / "native" / "include" / "kvedge.h").read_text()
    assert f"#define KVEDGE_ABI_VERSION {abi.ABI_VERSION}\n" in header


def test_odd_arguments_are_refused_and_change_nothing(native, tiny, worker, tmp_path, pytestconfig):
    """Every function gets each of its arguments invalid, one at a time. The cache's later results must not change."""
    every = 1 if pytestconfig.getoption("all") else 2  # of the invalid values of an argument
    model = tiny("llama", n_heads=2, n_heads_kv=1, head_size=32, n_vocab=400).model
    [found] = worker("sweep_worker.py", {"model": str(model), "folder": str(tmp_path), "every": every})
    assert found["wrong"] == []
    assert found["called"].keys() == declared() and sum(found["called"].values()) > 800 // every
