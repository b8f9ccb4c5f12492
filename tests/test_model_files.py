"""Models that would abort llama.cpp are refused with one line, before memory of their size is allocated."""

import dataclasses
import math
import sys
from contextlib import nullcontext

import pytest
from modelgen import tokens
from modelgen.text import TextSpec, text_model
from modelgen.writer import write_gguf

from pykvedge.errors import KvedgeWarning, ModelError
from pykvedge.models.model import Model
from pykvedge.models.modelfile import check_model
from pykvedge.models.shape import ModelShape

VOCABULARY = tokens.spm(512)
SPECS = {arch: TextSpec(arch, VOCABULARY, 2, 4, 2, 32, 128, 2048, "test") for arch in ("llama", "gemma3", "lfm2")}
TOKENS = VOCABULARY.meta["tokenizer.ggml.tokens"]


def written(folder, arch="llama", meta=(), name="m.gguf"):
    """Writes a model with changed metadata; None removes a key."""
    values, own = text_model(SPECS[arch])
    values = {key: value for key, value in {**values, **dict(meta)}.items() if value is not None}
    path = folder / name
    write_gguf(path, values, own)
    return path


NAN = math.nan
BROKEN = [
    ({"llama.block_count": 65536}, "block_count is 65536"),
    ({"llama.block_count": 513}, "1 to 512 layers"),
    ({"llama.block_count": 0}, "block_count is 0"),
    ({"llama.nextn_predict_layers": 3}, "nextn_predict_layers is 3"),
    ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[-2]]}, "1 of the 512 tokens in its vocabulary"),
    ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[-2] + "\0x"]}, "1 of the 512 tokens in its vocabulary"),
    ({"tokenizer.ggml.tokens": [*TOKENS[:-2], "[EMPTY_511]", ""]}, "1 of the 512 tokens in its vocabulary"),
    ({"tokenizer.ggml.model": "none"}, "has no tokenizer"),
    ({"tokenizer.ggml.model": "none\0"}, "has no tokenizer"),
    ({"tokenizer.ggml.model": "no_vocab"}, "has no tokenizer"),
    ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": 7}, "merges is not a list"),
    ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [7]}, "merges is not a list of texts"),
    ({"llama.attention.layer_norm_rms_epsilon": NAN}, "layer_norm_rms_epsilon is nan"),
    ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, "layer_norm_rms_epsilon is -9"),
    ({"llama.rope.freq_base": NAN}, "rope.freq_base is nan"),
    ({"llama.rope.scaling.type": "odd"}, "rope.scaling.type is not one of"),
    ({"llama.rope.dimension_count": 31}, "rope.dimension_count is 31"),
    ({"llama.rope.dimension_count": 34}, "rope.dimension_count is 34, but must be an even number of at most 32"),
    (
        {"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": 1},
        "no layer uses the sliding window",
    ),
    ({"llama.expert_used_count": 2}, "uses 2 of 0 experts"),
    ({"llama.expert_count": 4}, "uses 0 of 4 experts"),
    ({"llama.expert_count": 4000, "llama.expert_used_count": 2}, "4000 experts"),
    ({"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_group_count": 3}, "of 3 groups"),
]


@pytest.mark.parametrize(("meta", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_what_llama_cpp_would_abort_on_is_refused(tmp_path, meta, says):
    with pytest.raises(ModelError, match="cannot be used") as refused:
        check_model(written(tmp_path, meta=meta))
    assert says in str(refused.value)


@pytest.mark.parametrize(("chosen", "good"), [(0, False), (1, True), (3, True), (4, False)])
def test_some_groups_of_experts_are_chosen(tmp_path, chosen, good):
    groups = {"expert_group_count": 4, "expert_group_used_count": chosen}
    experts = {"expert_count": 8, "expert_used_count": 2, **groups}
    path = written(tmp_path, meta={f"llama.{name}": n for name, n in experts.items()})
    with nullcontext() if good else pytest.raises(ModelError, match=f"uses {chosen} of 4 groups"):
        check_model(path)


@pytest.mark.parametrize("alignment", [1, 8])
def test_tensors_that_begin_in_odd_places_are_refused(tmp_path, alignment):
    """ggml maps the file, and needs data that begins at a multiple of 32 bytes."""
    path = written(tmp_path)
    whole, data = path.read_bytes(), path.stat().st_size
    key = b"general.alignment"
    entry = len(key).to_bytes(8, "little") + key + (4).to_bytes(4, "little") + alignment.to_bytes(4, "little")
    count = int.from_bytes(whole[16:24], "little") + 1
    path.write_bytes(whole[:16] + count.to_bytes(8, "little") + entry + whole[24:])
    assert path.stat().st_size == data + len(entry)
    with pytest.raises(ModelError, match=r"does not begin at a multiple of 32 bytes|damaged"):
        check_model(path)


@pytest.mark.parametrize("at", [0, 4, 5, 12])
def test_chat_says_so_in_one_line(kvedge, tmp_path, at):
    meta, says = BROKEN[at]
    kvedge("chat", "--model", written(tmp_path, meta=meta), "Hi").failed(1, says, "m.gguf")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of address space")
def test_fit_takes_no_memory_for_layers_that_are_not_there(kvedge, tmp_path):
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    path = written(tmp_path, meta={"llama.block_count": 2**31 - 1})
    kvedge("fit", "--model", path, preexec_fn=limit).failed(1, "block_count is 2147483647")


@pytest.mark.parametrize("name", ["expert_used_count", "vocab_size", "attention.key_length", "feed_forward_length"])
@pytest.mark.parametrize("value", ["many", math.inf, NAN])
def test_numbers_that_are_none_are_a_named_error(tmp_path, name, value):
    changes = {f"llama.{name}": value, "tokenizer.ggml.tokens": []}
    with pytest.raises(ModelError):
        ModelShape.of(check_model(written(tmp_path, meta=changes)))


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"tokenizer.ggml.model": "t5", "tokenizer.ggml.bos_token_id": None}, "has no bos token, but adds this token"),
        ({"tokenizer.ggml.bos_token_id": TOKENS.index("a")}, "first token 'a' is not marked as special"),
    ],
)
def test_a_model_whose_prompts_cannot_begin_or_end_is_refused(kvedge, tmp_path, meta, says):
    kvedge("chat", "--model", written(tmp_path, meta=meta), "Hi").failed(1, says, "convert the model again")


def test_a_vocabulary_without_the_words_of_a_prompt_is_an_error(kvedge, tmp_path):
    vocabulary = tokens.bpe(512, template="{{ messages[-1].content }}")
    values, own = text_model(dataclasses.replace(SPECS["llama"], vocab=vocabulary))
    path = tmp_path / "m.gguf"
    write_gguf(path, {**values, "tokenizer.ggml.tokens": [f"[{i}]" for i in range(512)]}, own)
    kvedge("chat", "--model", path, "Hi").failed(1, "makes no tokens of the prompt", "convert the model again")


def test_a_model_that_does_not_say_how_to_split_words_gives_a_warning(tmp_path):
    values, own = text_model(dataclasses.replace(SPECS["llama"], vocab=tokens.bpe(512)))
    path = tmp_path / "m.gguf"
    write_gguf(path, {key: value for key, value in values.items() if key != "tokenizer.ggml.pre"}, own)
    with pytest.warns(KvedgeWarning, match="does not say how its tokeniser splits words"):
        Model(path).close()


# ------------------------------------------------------------------------------------------------- valid files


@pytest.mark.parametrize(("vocabulary", "kind"), [(tokens.spm(32000), "llama"), (tokens.bpe(151936, 151657), "qwen3")])
def test_vocabularies_of_real_sizes_are_taken(tmp_path, vocabulary, kind):
    path = tmp_path / "m.gguf"
    spec = dataclasses.replace(SPECS["llama"], arch=kind, vocab=vocabulary, n_heads=1, n_heads_kv=1, n_layers=1)
    write_gguf(path, *text_model(spec))
    assert check_model(path).distinct_tokens == vocabulary.size


def test_empty_tokens_are_no_duplicates(tmp_path):
    """llama.cpp gives each empty token a separate name."""
    check_model(written(tmp_path, meta={"tokenizer.ggml.tokens": [*TOKENS[:-2], "", ""]}))


@pytest.mark.parametrize("arch", SPECS)
def test_whatever_is_not_refused_runs(native, tmp_path, file_results, arch, pytestconfig):
    keys = [key for key in text_model(SPECS[arch])[0] if key.startswith(f"{arch}.")]
    values = (None, NAN, 0, 1, [1, 2])
    files = [
        written(tmp_path, arch, {key: value}, f"{i}.{j}.gguf")
        for i, key in enumerate(keys)
        for j, value in enumerate(values)
    ]
    every = 1 if pytestconfig.getoption("all") else 2
    assert "ran" in file_results("models", files=files[::every])
