"""The parts of the wheel's command that need no build of half an hour: what travels names nobody's folders."""

from __future__ import annotations

import zipfile
from pathlib import Path

import build_wheel
import pytest
from llama_source import SourceError


@pytest.fixture
def wheel(tmp_path):
    def make(**files):
        path = tmp_path / "a-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path

    return make


def test_a_folder_of_the_builder_is_found(wheel):
    folder = Path("/builder/kvedge")
    made = wheel(
        inside=b"\x7fELF\0assert /builder/kvedge/native/a.cpp:3\0", whole=b"\0/builder/kvedge\0",
        other=b"/builder/kvedges /else/where builder/kvedge", none=b"native/a.cpp",
    )  # fmt: skip
    found = list(build_wheel.named_folders(made, [folder, Path("/else")]))
    assert found == [("inside", folder), ("whole", folder), ("other", Path("/else"))]


def test_the_builders_folders_are_those_of_this_machine():
    folders = build_wheel.builders_folders()
    assert build_wheel.ROOT in folders and Path.home() in folders and Path("/") not in folders


def test_one_wheel_or_an_error(wheel, tmp_path):
    with pytest.raises(SourceError, match="holds 0 wheels"):
        build_wheel.only(tmp_path)
    assert build_wheel.only(wheel(a=b"").parent) == tmp_path / "a-1-py3-none-any.whl"
