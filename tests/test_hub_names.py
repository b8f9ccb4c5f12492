"""The files that user/repo[:quant] means, by the names in a repository. The rules are llama.cpp's."""

import pytest

from pykvedge import HubError, UnknownNameError, UsageError
from pykvedge.models.hub.names import HubRequest, Name, is_safe, split_of

PLAIN = ["m-BF16.gguf", "m-F16.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-Q8_0.gguf", "mmproj-m-f16.gguf"]


def choice(paths, quant="", file="", mmproj=""):
    return HubRequest(Name("user/repo", quant), file, mmproj).choice(paths)


@pytest.mark.parametrize(
    ("paths", "quant", "model"),
    [
        (PLAIN, "", "m-Q4_K_M.gguf"),
        (PLAIN, "Q8_0", "m-Q8_0.gguf"),
        (PLAIN, "q8_0", "m-Q8_0.gguf"),
        (PLAIN, "F16", "m-F16.gguf"),  # llama.cpp takes m-BF16.gguf
        (PLAIN, "BF16", "m-BF16.gguf"),
        (["m-F16.gguf", "m-Q8_0.gguf"], "", "m-Q8_0.gguf"),
        (["m-F16.gguf", "m-IQ2_M.gguf"], "", "m-F16.gguf"),
        (["imatrix-Q4_K_M.gguf", "mtp-Q4_K_M.gguf", "m.Q4_K_M.gguf"], "", "m.Q4_K_M.gguf"),
        (["m-Q4_K_M.txt", "m.gguf"], "", "m.gguf"),
        (["m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf"], "UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        (["Q8_0/m-Q8_0.gguf", "m-Q4_0.gguf"], "Q8_0", "Q8_0/m-Q8_0.gguf"),
        (["m.gguf"], "Q4_K.M", None),
        (["mQ4_K_M.gguf"], "Q4_K_M", "mQ4_K_M.gguf"),
    ],
)
def test_the_model_is_chosen_by_its_quantisation(paths, quant, model):
    if model is None:
        with pytest.raises(UnknownNameError):
            choice(paths, quant)
    else:
        assert choice(paths, quant).model == model


@pytest.mark.parametrize(
    ("paths", "quant", "mmproj"),
    [
        (PLAIN, "", "mmproj-m-Q8_0.gguf"),  # 8 bits are nearer to 4 than 16 bits
        (PLAIN, "F16", "mmproj-m-f16.gguf"),
        (["m-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "", "mmproj-BF16.gguf"),
        (["m-Q4_K_M.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"], "", "mmproj-F16.gguf"),
        (["a/m-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "a/mmproj-F16.gguf"], "", "a/mmproj-F16.gguf"),
        (["a/b/m-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "c/mmproj-F16.gguf"], "", "mmproj-Q8_0.gguf"),
        (["m-Q4_K_M.gguf", "c/mmproj-F16.gguf"], "", None),
        (["m-Q4_K_M.gguf"], "", None),
    ],
)
def test_the_image_encoder_is_the_nearest(paths, quant, mmproj):
    assert choice(paths, quant).mmproj == mmproj


def test_a_model_in_parts_is_all_of_its_parts():
    parts = [f"m-Q8_0-{n:05d}-of-00003.gguf" for n in (2, 1, 3)]
    found = choice(["m-Q8_0-00001-of-00002.gguf", *parts, "mmproj-f16.gguf"], file=parts[1])
    assert found.model == parts[1] and found.parts == tuple(sorted(parts))
    assert found.files == ("mmproj-f16.gguf", *sorted(parts))
    assert choice(parts).model == parts[1]
    with pytest.raises(HubError, match=r"part 3 of 3 of m-Q8_0-00001-of-00003\.gguf is missing"):
        choice(parts[:2])


def test_files_may_be_named_instead():
    assert choice(PLAIN, file="m-BF16.gguf").mmproj == "mmproj-m-f16.gguf"
    assert choice(PLAIN, mmproj="mmproj-m-f16.gguf").mmproj == "mmproj-m-f16.gguf"
    assert choice(PLAIN, mmproj="none").mmproj is None
    with pytest.raises(UnknownNameError, match=r"did you mean 'm-Q8_0\.gguf'"):
        choice(PLAIN, file="m-Q8_1.gguf")
    with pytest.raises(UnknownNameError, match="mmproj in user/repo"):
        choice(PLAIN, mmproj="m-F16.gguf")


def test_a_quantisation_that_is_missing_is_answered_with_those_that_there_are():
    with pytest.raises(UnknownNameError) as caught:
        choice(PLAIN, "Q5_K_M")
    assert all(word in str(caught.value) for word in ("'Q5_K_M'", "BF16, F16, Q4_K_M, Q8_0"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("paths", [[], ["README.md", "model.safetensors"], ["mmproj-f16.gguf"]])
def test_a_repository_without_a_model_is_refused(paths):
    with pytest.raises(HubError, match="user/repo has no GGUF model"):
        choice(paths)


HOSTILE = ["../m.gguf", "/etc/m.gguf", "a/../../m.gguf", "a//m.gguf", "./m.gguf", "a\\..\\m.gguf", "C:/m.gguf",
           "m.gguf:x.gguf", "a\n.gguf", "\x1b[2J.gguf", "\u202egg.gguf", "a" * 600 + ".gguf"]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_paths_are_refused(path):
    assert not is_safe(path)
    with pytest.raises(HubError, match="points outside the repository") as caught:
        choice([*PLAIN, path])
    assert str(caught.value).isprintable()


NO_NAMES = ["", "repo", "a/b/c", "/a/b", "a/", "../b", "a/..", "a--b/c", "a/b:", "a/b:Q4 K", "a/b:x:y", "a/b\n", "a/-b",
            "a/b.", "é/b", "x" * 300 + "/b", "a/b:" + "Q" * 70]  # fmt: skip


@pytest.mark.parametrize("text", NO_NAMES)
def test_names_that_are_none(text):
    with pytest.raises(UsageError, match="is not the name of a model"):
        Name.of(text)


def test_names():
    assert Name.of("user/repo") == Name("user/repo") and Name.of("a.b/c-d_e:UD-Q4_K_XL").quant == "UD-Q4_K_XL"
    assert str(Name("a/b", "Q8_0")) == "a/b:Q8_0" and str(Name("a/b")) == "a/b"
    with pytest.raises(UsageError):
        Name.of(5)  # type: ignore[arg-type]


def test_what_the_name_of_a_file_says():
    split = split_of("dir/m-q4_k_m-00002-of-00005.gguf")
    assert (split.prefix, split.quant, split.index, split.count, split.bits) == ("dir/m-q4_k_m", "Q4_K_M", 2, 5, 4)
    assert [split_of(f"m-{q}.gguf").bits for q in ("BF16", "IQ2_XXS", "NVFP4", "it")] == [16, 2, 4, 0]
    assert split_of("model.bin").count == 1 and split_of("model.bin").index == 0
