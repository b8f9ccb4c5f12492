"""The files that a command takes: the image encoder beside a model, a folder, and names that are no paths."""

import json
import shutil

import pytest
from click.testing import CliRunner

from pykvedge.cli.program import cli
from pykvedge.errors import KvedgeError


@pytest.fixture
def folder(tiny, tmp_path):
    """folder(NAME="kind.model" or "kind.mmproj", ...) -> a folder of files with these names."""

    def make(**names):
        for name, what in names.items():
            kind, _, part = what.partition(".")
            shutil.copy(getattr(tiny(kind), part), tmp_path / f"{name.replace('__', '.')}.gguf")
        return tmp_path

    return make


def fit(*arguments):
    """Returns the chosen image encoder and the text on stderr."""
    done = CliRunner().invoke(cli, ["fit", "--json", *map(str, arguments)])
    assert done.exit_code == 0, done
    return (json.loads(done.stdout)["mmproj"] or "").rpartition("/")[2], done.stderr


def refused(*arguments):
    done = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert isinstance(done.exception, KvedgeError) and done.stdout == "", done
    return str(done.exception)


def test_the_image_encoder_beside_a_model_is_found(kvedge, folder, picture_file):
    where = folder(**{"llava-Q4_K_M": "llava.model", "mmproj-llava-f16": "llava.mmproj", "mmproj-q": "qwen2vl.mmproj"})
    model = where / "llava-Q4_K_M.gguf"
    said = "kvedge: image encoder mmproj-llava-f16.gguf, found in the model's folder\n"
    assert fit(model) == ("mmproj-llava-f16.gguf", said)  # the other encoder does not fit
    assert fit(model, "--mmproj", "none") == ("", "")
    assert fit(model, "--mmproj", where / "mmproj-llava-f16.gguf") == ("mmproj-llava-f16.gguf", "")
    asked = ["--threads", 1, "--max-tokens", 4, "--image", picture_file(), "What?"]
    found = kvedge("chat", "-m", model, *asked)
    named = kvedge("chat", "-m", model, "--mmproj", where / "mmproj-llava-f16.gguf", *asked)
    assert found.code == 0 and found.out == named.out and found.err.startswith(said)
    assert said not in named.err
    assert said not in kvedge("chat", "-m", model, "--quiet", *asked).err
    assert "--image needs the image encoder" in refused("chat", "-m", model, "--mmproj", "none", *asked)


def test_of_several_encoders_names_decide_or_the_user(native, folder):
    encoder = "llava.mmproj"
    where = folder(**{"a-7b-Q4_K_M": "llava.model", "mmproj-a-7b-f16": encoder, "mmproj-b-7b-f16": encoder})
    assert fit(where / "a-7b-Q4_K_M.gguf")[0] == "mmproj-a-7b-f16.gguf"
    folder(**{"mmproj-a-7b-Q8_0": encoder, "c": "llava.model"})  # of one model's encoders, the nearest in bits
    assert fit(where / "a-7b-Q4_K_M.gguf")[0] == "mmproj-a-7b-Q8_0.gguf"
    names = "mmproj-a-7b-Q8_0.gguf, mmproj-a-7b-f16.gguf, mmproj-b-7b-f16.gguf"
    assert f"several image encoders in the folder of c.gguf fit: {names}; pass one" in refused("fit", where / "c.gguf")


def test_a_folder_stands_for_its_model(kvedge, folder, tmp_path):
    where = folder(one="llava.model", mmproj="llava.mmproj")
    assert fit(where)[0] == "mmproj.gguf"
    assert kvedge("run", where, "--max-tokens", 1, "--quiet", "Hello").code == 0
    folder(two="llava.model")
    assert "several models: one.gguf, two.gguf; name one" in refused("run", where, "Hello")
    (tmp_path / "empty").mkdir()
    assert "has no GGUF model" in refused("run", tmp_path / "empty", "Hello")


def test_a_path_that_is_wrong_is_no_name(native, tmp_path, monkeypatch):
    """The hub gets no request about a wrong path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for path in ("models/typo", "user/typo.gguf", "typo"):
        hint = "" if path.endswith(".gguf") else "; give a GGUF file, or a name of a model hub such as USER/REPO:Q4_K_M"
        assert refused("fit", path) == f"{path} does not exist{hint}"
    assert "user/typo is not in the cache" in refused("fit", "user/typo", "--offline")
