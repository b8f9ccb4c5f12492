"""attach: compression for an existing llama_cpp.Llama."""

import gc
import weakref

import pytest

import pykvedge
from pykvedge.errors import NothingToCompressError, StateError, UnknownNameError, UnsupportedError, UsageError

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture
def llama_of(tiny, closing):
    """llama_of(kind, **options) -> a llama_cpp.Llama, closed after the test."""
    from llama_cpp import Llama

    def make(kind="llama", **options):
        settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
        return closing(Llama(str(tiny(kind).model), **settings))

    return make


def complete(llm, prompt=PROMPT, n=8):
    return llm(prompt, max_tokens=n, temperature=0.0)["choices"][0]["text"]


def test_one_line_compresses_the_prompts_of_a_llama(llama_of):
    llm = llama_of()
    n_prompt = len(llm.tokenize(PROMPT.encode()))
    attached = pykvedge.attach(llm, method="lookm", budget=0.2)
    assert complete(llm)
    stats = attached.stats()
    assert stats.n_compressions == 1 and stats.after_bytes < stats.before_bytes
    generated = stats.n_tokens - n_prompt
    kept = pykvedge.plan("lookm", 0.2).count(n_prompt)
    assert attached.kept() == [[kept + generated] * 2] * 2


@pytest.mark.parametrize("n_batch", [1, 7, 16, 64])
def test_prompts_in_pieces_are_compressed_once_and_whole(llama_of, n_batch):
    llm = llama_of(n_batch=n_batch)
    tokens = llm.tokenize(PROMPT.encode())
    tokens = tokens[: len(tokens) // n_batch * n_batch + 1] if n_batch > 1 else tokens  # the last batch has one token
    attached = pykvedge.attach(llm, "h2o", 0.5)
    llm.eval(tokens)
    assert attached.stats().n_compressions == 0
    llm.eval([llm.sample()])
    stats = attached.stats()
    assert stats.n_compressions == 1 and stats.n_tokens == len(tokens) + 1
    assert attached.kept()[0][0] == len(tokens) // 2 + 1


def test_without_a_method_it_is_the_default_one(llama_of):
    assert pykvedge.attach(llama_of()).plan == pykvedge.default_plan()


def test_single_tokens_of_a_chat_handlers_prompt_are_no_answer(llama_of):
    llm = llama_of()
    llm.chat_handler = object()  # a chat handler reads prompts in pieces, also pieces of one token
    attached = pykvedge.attach(llm, "h2o", 0.5)
    tokens = llm.tokenize(PROMPT.encode())
    llm.eval(tokens[:20])
    llm.eval(tokens[20:21])
    assert attached.stats().n_compressions == 0
    llm.eval(tokens[21:])
    llm.eval([llm.sample()])
    assert attached.stats().n_compressions == 1
    assert attached.kept()[0][0] == len(tokens) // 2 + 1


def test_detaching_gives_the_model_back(llama_of):
    expected = complete(llama_of())
    llm = llama_of()
    with pykvedge.attach(llm, "lookm") as attached:
        complete(llm)
    assert complete(llm) == expected
    assert "eval" not in vars(llm) and "sample" not in vars(llm)
    attached.detach()
    with pytest.raises(StateError, match="detached"):
        attached.stats()
    pykvedge.attach(llm, "lookm")
    assert complete(llm)


def test_a_model_keeps_nothing_of_what_was_detached(llama_of):
    llm, seen = llama_of(), []
    for _ in range(3):
        with pykvedge.attach(llm, "lookm") as attached:
            complete(llm)
        seen.append(weakref.ref(attached))
        del attached
    gc.collect()
    assert [one() for one in seen] == [None] * 3


def test_closing_the_model_detaches(llama_of):
    llm = llama_of()
    attached = pykvedge.attach(llm, "lookm")
    complete(llm)
    llm.close()
    attached.detach()


def test_embeddings_of_wider_types(llama_of):
    from llama_cpp import llama_cpp

    llm = llama_of(type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    attached = pykvedge.attach(llm, "full")
    complete(llm)
    per_token = 2 * 2 * 128 * 4
    assert attached.stats().bytes >= attached.stats().n_tokens * per_token


def test_quantised_types_of_the_model_become_the_store_s(llama_of):
    from llama_cpp import llama_cpp

    llm = llama_of(type_k=llama_cpp.GGML_TYPE_Q8_0, type_v=llama_cpp.GGML_TYPE_Q4_0, flash_attn=True)
    attached = pykvedge.attach(llm, "full")
    llm.eval(list(range(100, 500)))
    full = attached.stats().bytes  # f16 until the prompt is complete
    llm.eval([5])
    assert 0.35 * full <= attached.stats().after_bytes <= 0.48 * full  # (34 + 18) / 128 of f16, in whole pages


def test_what_cannot_be_attached_to(llama_of):
    from llama_cpp import llama_cpp

    with pytest.raises(UsageError, match=r"takes a llama_cpp\.Llama"):
        pykvedge.attach("model.gguf")
    llm, closed = llama_of(), llama_of()
    with pytest.raises(UsageError, match=r"takes a llama_cpp\.Llama"):
        pykvedge.attach(type(llm))
    closed.close()
    with pytest.raises(StateError, match="closed"):
        pykvedge.attach(closed, "h2o")
    with pytest.raises(UnknownNameError):
        pykvedge.attach(llm, "lokm")
    with pytest.raises(UsageError, match="a Plan excludes budget and settings"):
        pykvedge.attach(llm, pykvedge.plan("h2o"), budget=0.3)
    pykvedge.attach(llm, "h2o")
    with pytest.raises(StateError, match="already attached to this model"):
        pykvedge.attach(llm, "h2o")
    with pytest.raises(NothingToCompressError):
        pykvedge.attach(llama_of("mamba"), "h2o")
    with pytest.raises(UnsupportedError, match="type_k"):
        pykvedge.attach(llama_of(type_k=llama_cpp.GGML_TYPE_IQ4_NL), "h2o")


def test_a_model_that_cannot_be_stored_says_why(tiny, closing):
    from llama_cpp import Llama

    llm = closing(Llama(str(tiny("llama", head_size=20).model), n_ctx=64, verbose=False))
    with pytest.raises(NothingToCompressError, match="the head size is not a multiple of 8"):
        pykvedge.attach(llm, "h2o")


def test_a_failed_attach_leaves_the_model_as_it_was(llama_of):
    llm = llama_of("mamba")
    with pytest.raises(NothingToCompressError):
        pykvedge.attach(llm, "h2o")
    assert "eval" not in vars(llm)
    assert complete(llm)


def test_importing_without_libraries_fails_only_when_they_are_used(started, tmp_path):
    """A plan needs the library for its stages' settings. Names of methods are known without the library."""
    code = (
        "import pykvedge\n"
        "print('lookm' in pykvedge.methods())\n"
        "for use in (lambda: pykvedge.plan('lookm'), lambda: pykvedge.Session('x.gguf')):\n"
        "    try: use()\n"
        "    except pykvedge.LibraryError as error: print(error)\n"
    )
    known, *refused = started(program=("-c", code), env={"KVEDGE_LIB_DIR": str(tmp_path)}).out.splitlines()
    assert known == "True" and len(refused) == 2
    assert all(line.startswith(f"KVEDGE_LIB_DIR={tmp_path} has no") for line in refused)
