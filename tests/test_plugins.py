"""Stages in Python: files, decorators, entry points; in a running model, in the NumPy engine, and when they fail."""

import threading
from pathlib import Path

import numpy as np
import pytest
from arrays import prompt
from test_decode_policies import PROMPT, random_tokens, running  # noqa: F401 - a fixture

import pykvedge
from pykvedge import Layer, PluginError, UnknownNameError
from pykvedge.plans import plugin_files
from pykvedge.reference.stages.scorer.cumulative import score as cumulative

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "plugins"
FIVE_LINES = """\
import numpy as np
import pykvedge
@pykvedge.scorer("mine", recent=0)
def mine(layer, settings):
    return np.tile(np.arange(layer.k.shape[1]) % 3 == 0, (layer.k.shape[0], 1))
"""
HEAD = "import numpy as np\nimport pykvedge\n"


def both_engines(plan, p=None):
    p = p or prompt(90)
    return [pykvedge.compress(plan, *p.arguments, engine=engine) for engine in ("native", "numpy")]


# ------------------------------------------------------------------------------------------ in a running model


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_five_lines_answer_about_a_picture(kvedge, tiny, write, picture_file, kind):
    options = ["--image", picture_file(), "--max-tokens", 8, "--json", "--plugin", write(FIVE_LINES)]
    done = kvedge("chat", *tiny(kind).arguments(), *options, "--method", "mine", "--budget", "0.3", "What is this?")
    assert done.code == 0 and done.err == "", done
    report = done.json
    n = pykvedge.plan("lookm", 0.3).count(report["tokens"]["prompt"])
    assert report["method"] == "mine" and report["kv"]["kept_per_layer"] == [n, n] and report["text"]


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_what_it_says_is_what_stays(native, tiny, write, picture_file, kind):
    plugin_files.load_file(write(FIVE_LINES))
    with tiny(kind).session(pykvedge.plan("mine", 0.3)) as session:
        session.ask("What is this?", [picture_file()]).close()
        n, cache = session.engine.cache.stats().n_tokens, session.engine.cache
        budget = pykvedge.plan("mine", 0.3).count(n)
        expected = [t for t in range(n) if t % 3 == 0][:budget]
        for layer in range(2):
            assert cache.tokens(layer, 0) == cache.tokens(layer, 1) == expected


def test_other_stages_go_with_it(kvedge, tiny, write):
    chat = ["chat", *tiny("llama").arguments(), "--max-tokens", 4, "--json", "--plugin", write(FIVE_LINES)]
    options = ["--method", "lookm", "--scorer", "mine", "--allocator", "pyramid", "--decode", "sliding", "--budget", 30]
    done = kvedge(*chat, *options, "word " * 100)
    assert done.code == 0 and sum(done.json["kv"]["kept_per_layer"]) == 60
    assert done.json["kv"]["kept_per_layer"][0] > 30


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_all_three_stages_of_an_example(kvedge, tiny, picture_file, kind):
    options = ["--image", picture_file(), "--max-tokens", 4, "--json", "--plugin", EXAMPLES / "pictures.py"]
    more = ["--method", "pictures", "--set", "scorer.window=4", "What is this, " * 10]
    kept = kvedge("chat", *tiny(kind).arguments(), *options, *more).json["kv"]["kept_per_layer"]
    assert 1.8 < kept[1] / kept[0] < 2.2  # rising: two thirds and four thirds


def test_the_arrays_are_those_of_the_model(native, tiny, picture_file):
    """The given column sums equal those computed from the given queries and keys."""
    seen: list[Layer] = []

    @pykvedge.scorer("looks", queries=4096, column_sums=True)
    def looks(layer, settings):
        seen.append(layer)
        return layer.column_sums

    with tiny("llava").session(pykvedge.plan("looks", 0.3)) as session:
        answer = session.ask("What is this?", [picture_file()])
        tokens = answer.report.tokens
        answer.close()
    assert [layer.index for layer in seen] == [0, 1] and all(layer.n_layers == 2 for layer in seen)
    for layer in seen:
        assert layer.q.shape == (4, tokens.prompt, 64) and layer.k.shape == layer.v.shape == (2, tokens.prompt, 64)
        assert layer.image_mask.sum() == tokens.image and not layer.image_mask[0]
        np.testing.assert_allclose(layer.column_sums, cumulative(layer, {"share": "head"}), rtol=2e-3)
    first = seen[0]
    assert first.k.flags.owndata and first.k.flags.writeable  # a copy: the plugin may keep it


def test_inspect_shows_what_a_plugin_keeps(kvedge, tiny, write, picture_file, tmp_path):
    options = ["--no-figures", "--json", "--quiet", "--output", tmp_path / "out", "--budget", "0.3"]
    plugin = ["--plugin", write(FIVE_LINES), "--method", "mine"]
    done = kvedge("inspect", picture_file(), *tiny("llava").arguments(), *options, *plugin)
    assert done.code == 0, done
    n = pykvedge.plan("lookm", 0.3).count(done.json["tokens"]["prompt"])
    assert done.json["budgets"]["mine"] == [[n, n], [n, n]]
    fails = write(FIVE_LINES.replace("return", "return 1 / 0 +"), "fails.py")
    done = kvedge("inspect", picture_file(), *tiny("llava").arguments(), *options, "--plugin", fails, *plugin[2:])
    done.failed(1, "ZeroDivisionError", "fails.py:5")


def test_callbacks_run_on_the_calling_thread(native):
    threads = set()

    @pykvedge.scorer("who")
    def who(layer, settings):
        threads.add(threading.get_ident())
        return layer.k[..., 0]

    @pykvedge.reducer("who")
    def who_reduces(head, settings):
        threads.add(threading.get_ident())
        return head.k[head.kept], head.v[head.kept]

    p = prompt(64, (8, 8), layers=6)
    pykvedge.compress(pykvedge.plan("who"), *p.arguments, threads=6)
    assert threads == {threading.get_ident()}


def test_a_conversation_goes_on_after_a_failure(kvedge, tiny, write):
    code = FIVE_LINES.replace("    return", "    if layer.k.shape[1] < 60: raise ValueError('too short')\n    return")
    chat = ["chat", *tiny("llama").arguments(), "--max-tokens", 2, "--plugin", write(code), "--method", "mine"]
    plugin_files.load_file(write(code))
    with tiny("llama").session(pykvedge.plan("mine")) as session:
        with pytest.raises(PluginError, match=r"scorer 'mine' failed: ValueError: too short \(my_method.py:5\)"):
            session.ask("Hello")
        assert session.ask("word " * 80).read()
        assert len(session.messages) == 2
    kvedge(*chat, "Hello").failed(1, "ValueError: too short (my_method.py:5)")


def test_automatic_compression_reports_the_failure_too(native, running):  # noqa: F811
    @pykvedge.scorer("fails")
    def fails(layer, settings):
        raise RuntimeError("not today")

    context = running(pykvedge.plan("fails"))
    context.decode(random_tokens(PROMPT))
    with pytest.raises(AssertionError):  # llama_decode returns only a code
        context.decode(random_tokens(1))
    with pytest.raises(PluginError, match="not today") as caught:
        context.cache.check()
    assert isinstance(caught.value.__cause__, RuntimeError)
    context.cache.check()


@pytest.mark.parametrize("stage", ["scorer", "allocator", "reducer"])
def test_a_failure_leaves_the_sequence_as_it_was(native, running, stage):  # noqa: F811
    calls = []

    def fails(given, settings):
        calls.append(given)
        if stage == "scorer" and len(calls) < 2:
            return given.k[..., 0]
        if stage == "reducer" and len(calls) < 4:
            return given.k[given.kept], given.v[given.kept]
        raise KeyError("the last one")

    getattr(pykvedge, stage)("fails")(fails)
    check_nothing_changed(running, {stage: "fails"}, f"{stage} 'fails' failed: KeyError: 'the last one'", 1)


def check_nothing_changed(running, stages, says, times):  # noqa: F811
    """Failed compressions do not change the sequence, and another plan can compress it."""
    context = running(pykvedge.plan("h2o", 0.2, **stages))
    context.decode(random_tokens(PROMPT))
    held, bytes_ = context.held(), context.cache.stats().bytes
    for _ in range(times):
        with pytest.raises(PluginError, match=says):
            context.cache.compress()
        assert context.held() == held and context.cache.stats().bytes == bytes_
    assert context.cache.stats().n_compressions == 0 and context.cache.stats().n_pending == PROMPT
    context.cache.set_plan(pykvedge.plan("knorm", 0.2))
    context.cache.compress()
    assert {n for heads in context.cache.lengths() for n in heads} == {PROMPT // 5}


def test_ctrl_c_inside_a_stage_is_ctrl_c(native):
    @pykvedge.scorer("stopped")
    def stopped(layer, settings):
        raise KeyboardInterrupt

    for engine in ("native", "numpy"):
        with pytest.raises(KeyboardInterrupt):
            pykvedge.compress(pykvedge.plan("stopped"), *prompt(20).arguments, engine=engine)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(("body", "says"), [
    ("return layer.k / 0", "must return an array"),
    ("return np.full(layer.k.shape[:2], np.nan)", "gave NaN for layer 0, KV head 0, token 0 (my_method.py:3)"),
    ("return layer.k[..., 0] / 0 * 0", "gave NaN"),
    ("return layer.k[..., 0].T", "(KV heads, tokens)"),
    ("return layer.k[0, :, 0]", "must return an array [2, "),
    ("return None", "not None (a return statement may be missing)"),
    ("pass", "not None (a return statement may be missing)"),
    ("return 'high'", "must return an array"),
    ("return layer.k[..., 0] + 1j", "not complex"),
    ("return layer.k[..., 0].astype(str)", "of numbers"),
    ("return [[1], [2, 3]]", "must return an array"),
    ("return {}", "not a dict"),
    ("return 1 / 0", "failed: ZeroDivisionError: division by zero (my_method.py:5)"),
    ("return layer.nothing", "failed: AttributeError"),
    ("return settings['window']", "failed: KeyError"),
    ("raise SystemExit(3)", "failed: SystemExit: 3 (my_method.py:5)"),
    ("return np.linalg.inv(layer.k)", "failed: LinAlgError"),
    ("raise MemoryError", "failed: MemoryError (my_method.py:5)"),
    ("raise ValueError('two\\nlines ' + 'x' * 600)", "ValueError: two lines xxx"),
    ("return mine(layer, settings)", "RecursionError"),
])  # fmt: skip
def test_scorers_that_fail(native, write, body, says):
    plugin_files.load_file(write(f"{HEAD}@pykvedge.scorer('mine')\ndef mine(layer, settings):\n    {body}\n"))
    for engine in ("native", "numpy"):
        with pytest.raises(PluginError) as caught:
            pykvedge.compress(pykvedge.plan("mine"), *prompt(90).arguments, engine=engine)
        assert "scorer 'mine'" in str(caught.value) and says in str(caught.value), str(caught.value)
        assert "(my_method.py:" in str(caught.value) and "\n" not in str(caught.value)


ALLOCATORS = [
    ("prompt.scores.shape", "must return an array"),
    ("np.full(prompt.scores.shape[:2], prompt.budget + 1)", "KV pairs in total, but the total must be"),
    ("np.full(prompt.scores.shape[:2], float(prompt.budget))", "whole numbers (an integer dtype), not float64"),
    ("np.zeros(prompt.scores.shape[:2], int)",
     "gives a KV head a budget of 0 KV pairs; a KV head of 90 tokens needs a budget of 1 to 90"),
    ("np.full(prompt.scores.shape[:2], 10**12)", "gives a KV head a budget of 1000000000000 KV pairs"),
    ("np.full(prompt.scores.shape[0], prompt.budget)", "(layers, KV heads), not [2]"),
]
REDUCERS = [
    ("head.k", "must return two arrays, keys and values, not a ndarray"),
    ("(head.k, head.v)", "keys: must return an array [18, 32]"),
    ("(head.k[head.kept] * np.nan, head.v[head.kept])", "NaN or infinite keys"),
    ("(head.k[head.kept], head.v[head.kept] / 0)", "NaN or infinite values"),
    ("None", "not None (a return statement may be missing)"),
]


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize(
    ("stage", "body", "says"), [("allocator", *a) for a in ALLOCATORS] + [("reducer", *r) for r in REDUCERS]
)
def test_allocators_and_reducers_that_fail(native, write, engine, stage, body, says):
    argument = {"allocator": "prompt", "reducer": "head"}[stage]
    code = f"{HEAD}@pykvedge.{stage}('mine')\ndef mine({argument}, settings):\n    return {body}\n"
    plugin_files.load_file(write(code))
    with pytest.raises(PluginError) as caught:
        pykvedge.compress(pykvedge.plan("h2o", **{stage: "mine"}), *prompt(90).arguments, engine=engine)
    assert f"{stage} 'mine'" in str(caught.value) and says in str(caught.value), str(caught.value)
    assert "(my_method.py:3)" in str(caught.value)


def test_rows_that_the_storage_type_cannot_hold(native):
    @pykvedge.reducer("huge")
    def huge(head, settings):
        return head.k[head.kept] * 1e6, head.v[head.kept]

    plan = pykvedge.plan("h2o", reducer="huge")
    with pytest.raises(PluginError, match=r"reducer 'huge' gave .* in the key of token .*65504"):
        pykvedge.compress(plan, *prompt(90).arguments)
    assert np.isfinite(pykvedge.compress(plan, *prompt(90).arguments, kv_type="f32").k[0][0]).all()


@pytest.mark.parametrize(("code", "words"), [
    ("def mine(:\n", ["SyntaxError", "my_method.py:1"]),
    ("x = 1\nif x:\nprint(x)\n", ["IndentationError", "my_method.py:3"]),
    ("import nothing_of_that_name\n", ["ModuleNotFoundError", "my_method.py:1"]),
    ("x = 1\nraise ValueError('no')\n", ["ValueError: no", "my_method.py:2"]),
    ("import sys\nsys.exit(0)\n", ["SystemExit", "my_method.py:2"]),
    ("x = 1\n", ["registers no scorer, allocator, reducer, pruner or preset"]),
    ("", ["registers no"]),
    (HEAD + "pykvedge.preset('mine', scorer='nobody')\n", ["preset 'mine'", "unknown scorer 'nobody'"]),
    (HEAD + "pykvedge.preset('mine', scorrer='window')\n", ["preset 'mine'", "scorrer"]),
    (HEAD + "pykvedge.preset('lookm', scorer='window')\n", ["the name 'lookm' belongs to a built-in method"]),
    (HEAD + "@pykvedge.scorer('knorm')\ndef f(l, s): pass\n", ["the name 'knorm' belongs to a built-in scorer"]),
    (HEAD + "@pykvedge.scorer\ndef f(l, s): pass\n", ['write @pykvedge.scorer("name")', "my_method.py:3"]),
    (HEAD + "@pykvedge.scorer('Mine')\ndef f(l, s): pass\n", ["the name of a scorer must have 1 to 40", "'Mine'"]),
    (HEAD + "@pykvedge.scorer('mine two')\ndef f(l, s): pass\n", ["the name of a scorer"]),
    (HEAD + "@pykvedge.scorer('')\ndef f(l, s): pass\n", ["the name of a scorer"]),
    (HEAD + "@pykvedge.scorer(7)\ndef f(l, s): pass\n", ["the name of a scorer"]),
    (HEAD + "@pykvedge.scorer('x' * 10**6)\ndef f(l, s): pass\n", ["the name of a scorer", "..."]),
    (HEAD + "@pykvedge.scorer('mine\\n')\ndef f(l, s): pass\n", ["the name of a scorer"]),
    (HEAD + "@pykvedge.scorer('mine', queries=-1)\ndef f(l, s): pass\n", ["queries of scorer 'mine'"]),
    (HEAD + "@pykvedge.scorer('mine', recent=0.5)\ndef f(l, s): pass\n", ["recent of scorer 'mine'"]),
    (HEAD + "@pykvedge.scorer('mine', params=['window'])\ndef f(l, s): pass\n", ["params of scorer 'mine'"]),
    ("\x00", ["my_method.py"]),
])  # fmt: skip
def test_files_that_cannot_be_used(write, code, words):
    with pytest.raises(PluginError) as caught:
        plugin_files.load_file(write(code))
    assert len(str(caught.value)) < 300
    for word in ("my_method.py", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(("code", "says"), [
    ("def mine(:\n", "SyntaxError"), ("raise SystemExit", "SystemExit"), ("", "registers no"),
    ("import pykvedge\n@pykvedge.scorer('x' * 10**6)\ndef f(l, s): pass\n", "the name of a scorer"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_line(kvedge, write, code, says):
    done = kvedge("methods", "--plugin", write(code))
    done.failed(1, "my_method.py", says)
    assert len(done.err) < 400


def test_files_that_are_not_there(kvedge, tmp_path, write, tiny):
    kvedge("chat", "--plugin", "nowhere.py", "Hello").failed(1, "plugin nowhere.py does not exist")
    kvedge("methods", "--plugin", tmp_path).failed(1, "the path is a folder, not a file")
    kvedge("methods", "--plugin", write("x", "plugin.txt")).failed(1, "neither a Python file")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    kvedge("methods", "--plugin", tmp_path / "bytes.py").failed(1, "bytes.py")
    chat = ["chat", *tiny("llama").arguments(), "--plugin", write(FIVE_LINES)]
    kvedge(*chat, "--method", "mime", "Hello").failed(2, "did you mean 'mine'")


def test_a_traceback_is_there_for_who_asks(kvedge, tiny, write):
    plugin = write(FIVE_LINES.replace("return", "return 1 / 0 +"))
    chat = ["chat", *tiny("llama").arguments(), "--plugin", plugin, "--method", "mine", "Hello"]
    done = kvedge(*chat, env={"KVEDGE_DEBUG": "1"})
    assert done.code == 1 and "Traceback" in done.err and "ZeroDivisionError" in done.err and "my_method.py" in done.err


def test_what_a_plugin_prints_is_not_data(kvedge, tiny, write):
    plugin = write(FIVE_LINES.replace("    return", "    print('layer', layer.index)\n    return"))
    done = kvedge("chat", *tiny("llama").arguments(), "--plugin", plugin, "--method", "mine", "--json", "Hello there")
    assert done.json["method"] == "mine" and "layer 1" in done.err


def test_a_plugin_that_fails_leaves_nothing_behind(write):
    with pytest.raises(PluginError):
        plugin_files.load_file(write(FIVE_LINES + "raise ValueError\n"))
    with pytest.raises(UnknownNameError):
        pykvedge.plan("mine")
