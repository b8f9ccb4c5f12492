"""Scorer expected: the definition against loops, both engines, and the runtime against the model's own queries."""

import ctypes

import numpy as np
import oracles
import pytest
from arrays import check_engines_agree, prompt
from batches import send
from contexts import TinyContext, random_tokens
from modelgen.layers import mrope_sections
from test_stream_parity import agree

import pykvedge
from pykvedge import ArrayError, Layer, Rotation, UnsupportedError, UsageError
from pykvedge.library import libkvedge
from pykvedge.library.native_plan import check_stream
from pykvedge.models.gguf import read_header
from pykvedge.native import libraries
from pykvedge.plans.registry import member
from pykvedge.reference.stages.scorer.expected import expected_attention, statistics

SETTINGS = {"n_future": 512, "n_sink": 4, "covariance": True, "vnorm": True, "eps": 0.0}
ROTATIONS = {
    "none": Rotation(),
    "norm": Rotation.of(16, pairs="norm"),
    "neox": Rotation.of(16, base=500.0),
    "part": Rotation.of(8, factors=[1, 2, 2, 8]),
}


def score(p, settings=SETTINGS, rotation=None):
    layer = Layer(p.q[0], p.k[0], p.v[0], p.image_mask, rotation=rotation)
    return member("scorer", "expected").score(layer, settings)


@pytest.mark.parametrize("changed", [
    {}, {"covariance": False}, {"vnorm": False}, {"eps": 0.02}, {"n_future": 3}, {"n_sink": 0}, {"n_sink": 1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("turned", ROTATIONS)
def test_scores_are_those_of_the_paper(turned, changed):
    settings, rotation = {**SETTINGS, **changed}, ROTATIONS[turned]
    for n_tokens in (5, 12):
        p = prompt(n_tokens, (4, 2), size=16, layers=1)
        scores, first = score(p, settings, rotation), settings["n_sink"]
        for h in range(2):
            q = p.q[0, 2 * h : 2 * h + 2].tolist()
            turning = rotation.angles.tolist(), rotation.pairs == "neox"
            expected = oracles.expected_attention(q, p.k[0, h].tolist(), p.v[0, h].tolist(), turning, settings)
            np.testing.assert_allclose(scores[h, first:], expected, rtol=1e-8)
        assert (scores[:, :first] == scores[:, first:].max() + 1).all()


def test_the_usual_angles():
    np.testing.assert_allclose(Rotation.of(8).angles, [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(Rotation.of(8, factors=[1, 1, 2, 4]).angles, [1, 0.1, 0.005, 0.00025])


def test_what_says_nothing_leaves_the_values_to_choose():
    p = prompt(12, (2, 1), size=8, layers=1)
    p.q[:] = 0
    np.testing.assert_allclose(score(p)[0, 4:], np.linalg.norm(p.v[0, 0, 4:], axis=-1) / 8, rtol=1e-6)
    p.q[:], p.k[:] = 1, 2  # all equal
    np.testing.assert_allclose(score(p)[0, 4:], np.linalg.norm(p.v[0, 0, 4:], axis=-1) / 8, rtol=1e-6)


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_a_prompt_of_sinks_alone_is_kept_whole_and_of_a_longer_one_the_sinks_stay(native, engine):
    for n_tokens, kept in ((1, [0]), (4, [0, 1, 2, 3])):
        made = pykvedge.compress(pykvedge.plan("expected", 1, recent=0), *prompt(n_tokens).arguments, engine=engine)
        assert made.kept[0][0].tolist() == kept
    made = pykvedge.compress(pykvedge.plan("expected", 8, recent=0), *prompt(60).arguments, engine=engine)
    assert all(set(range(4)) <= set(head.tolist()) for layer in made.kept for head in layer if len(head) >= 4)


@pytest.mark.parametrize("allocator", ["uniform", "ada", "global"])
@pytest.mark.parametrize("turned", ROTATIONS)
def test_both_engines_turn_alike(native, turned, allocator):
    for n_tokens, heads in ((5, (4, 2)), (64, (4, 1)), (300, (3, 3))):
        p = prompt(n_tokens, heads, size=24, layers=3)
        check_engines_agree(1e-5, pykvedge.plan("expected", 0.3, allocator=allocator), p, rotation=ROTATIONS[turned])


def test_large_means_do_not_drown_the_covariance(native):
    p = prompt(200, size=32)
    p.q[:] += 40
    p.k[:] -= p.k.mean(axis=-1, keepdims=True)  # products with the mean cancel
    with_it, without = ({"scorer.covariance": on, "allocator": "uniform"} for on in (True, False))
    ours = check_engines_agree(1e-5, pykvedge.plan("expected", 0.3, **with_it), p)
    others = check_engines_agree(1e-5, pykvedge.plan("expected", 0.3, **without), p)
    assert not np.allclose(ours.scores, others.scores, rtol=0.1)


@pytest.mark.parametrize("step", [1, 7, 64, 230])
def test_statistics_of_a_stream_go_on(native, step):
    plan = pykvedge.plan("expected", 40, allocator="uniform")
    agree(plan, prompt(230 if step > 1 else 60), step)
    with pytest.raises(UsageError, match="first 4 tokens"):
        check_stream(plan.with_(budget=3))


def test_rotations_that_are_none_are_refused(native):
    p = prompt(20, size=16)
    for wrong in (Rotation.of(24), "neox"):
        for engine in ("native", "numpy"):
            with pytest.raises(ArrayError, match="rotation"):
                pykvedge.compress(pykvedge.plan("expected"), *p.arguments, engine=engine, rotation=wrong)
    for made in ({"angles": np.ones((2, 2))}, {"angles": [np.nan]}, {"pairs": "both"}):
        with pytest.raises(ArrayError):
            Rotation(**made)


class Tensor(ctypes.Structure):
    """The first fields of a ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
    ]  # fmt: skip


class Watched(TinyContext):
    """Records each layer's queries before their rotation: queries[layer] has [tokens, H, d] arrays."""

    def __init__(self, *arguments, adjusted=None, **options):
        self.queries, self.adjusted = {}, adjusted or {}
        super().__init__(*arguments, **options)
        self.at = 0

    def _adjust(self, params):
        for name, value in self.adjusted.items():
            setattr(params, name, value)
        ggml = ctypes.CDLL(str(libraries.require_dir() / libraries.file_name("ggml-base")))
        for function, kind in (("ggml_get_name", ctypes.c_char_p), ("ggml_op_desc", ctypes.c_char_p),
                               ("ggml_get_data", ctypes.c_void_p)):  # fmt: skip
            getattr(ggml, function).restype, getattr(ggml, function).argtypes = kind, [ctypes.c_void_p]

        def seen(tensor, ask, _):
            name, _, layer = ggml.ggml_get_name(tensor).decode().partition("-")
            if ask and name == "Qcur" and ggml.ggml_op_desc(tensor) == b"ROPE":
                before = Tensor.from_address(tensor).src[0]  # computed, and not yet overwritten
                t = Tensor.from_address(before)
                flat = (ctypes.c_float * (sum(n * (m - 1) for n, m in zip(t.nb, t.ne, strict=True)) // 4 + 1))
                rows = np.frombuffer(flat.from_address(ggml.ggml_get_data(before)), np.float32)
                rows = np.lib.stride_tricks.as_strided(rows, (t.ne[2], t.ne[1], t.ne[0]), (t.nb[2], t.nb[1], t.nb[0]))
                self.queries.setdefault(int(layer), []).append(rows.copy())
            return True  # runs one operation after the other

        self._seen = self.llama.ggml_backend_sched_eval_callback(seen)
        params.cb_eval = self._seen

    def read(self, tokens):
        """Reads text at the next position."""
        assert send(self.context, range(self.at, self.at + len(tokens)), tokens, wants=[0] * len(tokens)) == 0
        self.at += len(tokens)

    def look(self, down, across):
        """Reads an image with random rows, at M-RoPE's positions."""
        n, width = down * across, self.llama.llama_model_n_embd_inp(self.model)
        rows = np.random.default_rng(n).normal(0, 0.02, (n, width))
        y, x = np.divmod(np.arange(n), across)
        positions = np.concatenate([np.full(n, self.at), self.at + y, self.at + x, np.zeros(n)])
        assert send(self.context, positions, rows=rows, wants=[0] * n) == 0
        self.at += max(down, across)

    def by_definition(self, layer, rotation, longer=1.0):
        """Returns scores [Hkv, T] of a stored layer, from the recorded queries and the held keys and values.

        longer: factor by which the model's rotation lengthens rows.
        """
        of_model = libkvedge.lib().kvedge_layer_id(self.cache.handle, layer)
        queries = np.concatenate(self.queries[of_model]).astype(np.float64)[4:] * longer
        _, n_heads_kv, size, _ = libkvedge.shape(self.cache, layer)
        turn, group = rotation.mean(self.at, 512, size), queries.shape[1] // n_heads_kv
        out = []
        for h in range(n_heads_kv):
            k, v = (x[4:].astype(np.float64) for x in libkvedge.rows(self.cache, layer, h))
            shares = []
            for g in range(group):
                mean, covariance = statistics(queries[:, h * group + g])
                shares.append(expected_attention(turn @ mean, turn @ covariance @ turn.T, k))
            out.append((np.mean(shares, axis=0) + 0.01) * np.linalg.norm(v, axis=-1))
        return np.array(out)


def rotation_of(model, pairs):
    """Returns the rotation of text."""
    values = read_header(model).values
    arch = values["general.architecture"]
    out = Rotation.of(values[f"{arch}.rope.dimension_count"], values[f"{arch}.rope.freq_base"], pairs)
    if arch == "qwen3vl":  # each third pair belongs to one of three positions, within its section; other pairs stay
        sections = mrope_sections(2 * len(out.angles))
        out.angles[[i for i in range(len(out.angles)) if i >= 3 * sections[i % 3]]] = 0
    return out


@pytest.mark.parametrize(("kind", "pairs"), [
    ("llama", "norm"), *((kind, "neox") for kind in ("qwen3", "phi3", "gemma3", "qwen2vl", "qwen3vl")),
])  # fmt: skip
def test_queries_are_turned_back_as_the_model_turned_them(native, tiny, kind, pairs):
    model = tiny(kind).model
    with Watched(model, pykvedge.plan("expected", 0.5), "f32", n_ctx=1024, threads=2) as context:
        context.read(random_tokens(50))
        if kind.endswith("vl"):
            context.look(5, 7)
            context.read(random_tokens(9, 1))
            context.look(3, 2)
        context.read(random_tokens(30, 2))
        for layer in range(len(context.cache.lengths())):
            found = libkvedge.pending_scores(context.cache, layer)
            np.testing.assert_allclose(found[:, 4:], context.by_definition(layer, rotation_of(model, pairs)), rtol=2e-3)


def yarn(size, base, scale, trained, fast=32.0, slow=1.0):
    """Returns the angles of YaRN (Peng et al. 2023, section 3.2): pairs that turn often in the trained context stay."""
    out = []
    for i in range(size // 2):
        angle = base ** (-2 * i / size)
        low, high = (size * np.log(trained / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (fast, slow))
        low, high = max(0, np.floor(low)), min(size - 1, np.ceil(high))
        kept = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)
        out.append(angle * (kept + (1 - kept) * scale))
    return out


def turned_otherwise(model, of):
    """Returns settings of a context whose rotary angles are not its model's, and these angles."""
    llama = libraries.llama()
    adjusted = {
        "yarn": {
            "rope_scaling_type": llama.LLAMA_ROPE_SCALING_TYPE_YARN, "rope_freq_scale": 0.25, "yarn_orig_ctx": 256,
            "yarn_ext_factor": 1.0,
        },
        "linear": {"rope_freq_scale": 0.25},
        "base": {"rope_freq_base": 700.0},
    }[of]  # fmt: skip
    size = read_header(model).values["llama.rope.dimension_count"]
    angles = {"yarn": yarn(size, 10000.0, 0.25, 256), "linear": Rotation.of(size).angles / 4,
              "base": Rotation.of(size, 700.0).angles}[of]  # fmt: skip
    return adjusted, angles


@pytest.mark.parametrize("of", ["yarn", "linear", "base"])
def test_contexts_that_turn_otherwise_than_their_model(native, tiny, of):
    model = tiny("llama").model
    adjusted, angles = turned_otherwise(model, of)
    with Watched(model, pykvedge.plan("expected", 0.5), "f32", n_ctx=1024, adjusted=adjusted) as context:
        context.read(random_tokens(120))
        ours = libkvedge.pending_scores(context.cache, 1)[:, 4:]
        longer = 1 + 0.1 * np.log(4) if of == "yarn" else 1.0  # Peng et al., eq. 15, for keys and queries
        np.testing.assert_allclose(ours, context.by_definition(1, Rotation(angles, "norm"), longer), rtol=2e-3)
        models = Rotation.of(2 * len(angles), pairs="norm")
        assert not np.allclose(ours, context.by_definition(1, models, longer), rtol=2e-3)


def test_a_model_that_turns_queries_in_another_way_is_refused(kvedge, tiny):
    """Llama 4 scales the queries of its full-attention layers by position, which the scorer cannot reproduce."""
    model = tiny("llama4").model
    with pytest.raises(UnsupportedError, match="in layer 3 the model uses positions in a way that kvedge"):
        TinyContext(model, pykvedge.plan("expected", 0.5))
    done = kvedge("chat", "--model", model, "--mmproj", "none", "--method", "expected", "--threads", 1, "Hello?")
    done.failed(1, "scorer 'expected'", "layer 3")


def test_a_prompt_in_pieces_is_a_prompt_at_once(native, tiny):
    kept, tokens = [], random_tokens(150)
    for pieces in (1, 7, 150):
        with TinyContext(tiny("llama").model, pykvedge.plan("expected", 0.3), "f32", threads=2) as context:
            context.cache.set_auto_compress(False)
            for part in np.array_split(tokens, pieces):
                context.decode(part.tolist())
            scores = libkvedge.pending_scores(context.cache, 1)
            kept.append(scores)
    np.testing.assert_allclose(kept[0], kept[1], rtol=1e-3)
    np.testing.assert_allclose(kept[0], kept[2], rtol=1e-3)


def test_sequences_in_one_batch_have_statistics_of_their_own(native, tiny):
    def scores(*parts):
        with TinyContext(tiny("qwen2vl").model, pykvedge.plan("expected", 0.3), "f32", threads=2) as context:
            context.cache.set_auto_compress(False)
            for at in (slice(0, 25), slice(25, None)):
                context.decode(*(part[at] for part in parts))
            return [libkvedge.pending_scores(context.cache, 1, i) for i in range(len(parts))]

    parts = random_tokens(60), random_tokens(41, 1)
    for together, part in zip(scores(*parts), parts, strict=True):
        np.testing.assert_allclose(together, scores(part)[0], rtol=1e-3)
