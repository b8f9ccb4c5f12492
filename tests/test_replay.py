"""Scorer replay: the definition against loops, both engines, and the second pass, which leaves no trace."""

import ctypes
import threading

import numpy as np
import oracles
import pytest
from arrays import check_engines_agree, prompt
from contexts import TinyContext, random_tokens, replaying
from conversations import WORDS, say

import pykvedge
from pykvedge.errors import ArrayError, CancelledError, StateError, UnsupportedError, UsageError
from pykvedge.library import libkvedge, native_plan
from pykvedge.models.vision import ImagePiece, TextPiece
from pykvedge.native.abi import ReplayChunk
from pykvedge.native.calls import call
from pykvedge.plans.registry import member
from pykvedge.reference.stages.base import Layer
from pykvedge.reference.stages.replay import Replay
from pykvedge.runtime.replay import Passage
from pykvedge.runtime.sampling import Sampling

SETTINGS = {"source": "repeat", "scope": "chunk", "chunk": 2000, "projected": False}
PLAN = {"scorer": "replay", "scorer.source": "repeat"}
CUTS = {
    "one": lambda n: [ReplayChunk(0, n, n + 3)],
    "three": lambda n: [ReplayChunk(0, n // 3, 5, 2), ReplayChunk(n // 3, n // 2, 9, 2), ReplayChunk(n // 2, n, 1, 2)],
    "a part": lambda n: [ReplayChunk(n // 2, n, 4, min(n, 3))],
}


def second_pass(p, chunks, seed=5):
    """Returns random queries and keys for the tokens of a second pass."""
    n, draw = sum(c.n_tokens for c in chunks), np.random.default_rng(seed)
    shape = lambda x: (*x.shape[:2], n, x.shape[3])  # noqa: E731
    return Replay(draw.normal(0, 2, shape(p.q)), draw.normal(0, 1, shape(p.k)), chunks)


def score(p, settings=SETTINGS, replay=None):
    return member("scorer", "replay").score(Layer(p.q[0], p.k[0], p.v[0], p.image_mask, replay=replay), settings)


@pytest.mark.parametrize("scope", ["chunk", "context"])
@pytest.mark.parametrize("cut", CUTS)
def test_scores_are_those_of_the_paper(cut, scope):
    p = prompt(12, (4, 2), size=8, layers=1)
    replay = second_pass(p, CUTS[cut](12))
    found = score(p, {**SETTINGS, "scope": scope}, replay)
    for h in range(2):
        k, at, expected = p.k[0, h].tolist(), 0, [0.0] * 12
        for c in replay.chunks:
            q = replay.q[0, 2 * h : 2 * h + 2, at : at + c.n_tokens].tolist()
            own = replay.k[0, h, at : at + c.n_tokens].tolist()
            paid = oracles.replayed(q, k, own, (c.first, c.last, c.sinks), scope == "chunk")
            expected, at = [max(a, b) for a, b in zip(expected, paid, strict=True)], at + c.n_tokens
        sinks = max(c.sinks for c in replay.chunks)
        np.testing.assert_allclose(found[h, sinks:], expected[sinks:], rtol=1e-6)
        assert (found[h, :sinks] == 2).all()


def test_the_prompts_own_queries_stand_in_for_a_pass_that_there_was_not():
    p = prompt(9, (4, 2), size=8, layers=1)
    found = score(p, {**SETTINGS, "source": "prompt"})
    for h in range(2):
        expected = oracles.largest_attention(p.q[0, 2 * h : 2 * h + 2].tolist(), p.k[0, h].tolist())
        np.testing.assert_allclose(found[h], expected, rtol=1e-6)
    np.testing.assert_array_equal(found, score(p))


@pytest.mark.parametrize("allocator", ["uniform", "ada", "global"])
@pytest.mark.parametrize("scope", ["chunk", "context"])
@pytest.mark.parametrize("cut", CUTS)
def test_both_engines_go_by_the_same_pass(native, cut, scope, allocator):
    for n_tokens, heads, kv_type in (
        (6, (4, 2), "f16"), (64, (4, 1), "bf16"), (300, (3, 3), "f16"), (90, (4, 2), "q8_0"),
    ):  # fmt: skip
        p = prompt(n_tokens, heads, size=32, layers=3)
        plan = pykvedge.plan("h2o", 0.3, allocator=allocator, **{**PLAN, "scorer.scope": scope})
        check_engines_agree(1e-6, plan, p, replay=second_pass(p, CUTS[cut](n_tokens)), kv_type=kv_type)


def test_attention_to_what_a_chunk_is_about_is_not_lost_beside_what_it_is_not_about(native):
    """All keys outside the chunk match the query far better, but the attention is shared only within the chunk."""
    p = prompt(40, (2, 1), size=16, layers=1)
    p.k[:, :, :20], p.k[:, :, 20:] = 12, -12
    chunks = [ReplayChunk(20, 40, 6)]
    replay = Replay(np.full((1, 2, 6, 16), 9), np.full((1, 1, 6, 16), -14), chunks)
    ours = check_engines_agree(1e-6, pykvedge.plan("h2o", 0.5, recent=0, **PLAN), p, replay=replay)
    np.testing.assert_allclose(ours.scores[0, 0, 20:], 1 / 20, rtol=1e-3)
    assert (ours.scores[0, 0, :20] == 0).all()


def test_a_pass_that_does_not_fit_is_refused(native):
    p = prompt(20, (4, 2), size=16)
    for wrong in (
        "again",
        second_pass(prompt(20, (4, 4), size=16), CUTS["one"](20)),
        second_pass(p, [ReplayChunk(0, 21, 4)]),
        second_pass(p, [ReplayChunk(5, 5, 4)]),
        second_pass(p, [ReplayChunk(0, 5, 4, 21)]),
    ):
        for engine in ("native", "numpy"):
            with pytest.raises(ArrayError, match=r"replay|chunk"):
                pykvedge.compress(pykvedge.plan("kvzip"), *p.arguments, engine=engine, replay=wrong)
    q, k = np.ones((1, 2, 5, 8)), np.ones((1, 1, 5, 8))
    for made in ((q, k, []), (q, k, [ReplayChunk(0, 1, 4)]), (q[0], k[0], [ReplayChunk(0, 1, 5)]),
                 (q * np.nan, k, [ReplayChunk(0, 1, 5)])):  # fmt: skip
        with pytest.raises(ArrayError, match="replay"):
            Replay(*made)
    with pytest.raises(ArrayError, match="stream"):
        pykvedge.compress(pykvedge.plan("h2o", 5), *p.arguments, stream=4, replay=second_pass(p, CUTS["one"](20)))


def test_where_there_is_no_second_pass_a_method_of_one_is_refused(native):
    plan = pykvedge.plan("kvzip", 64, allocator="uniform")
    with pytest.raises(UsageError, match="a stream has no complete prompt"):
        native_plan.check_stream(plan)
    assert "a second time" in native_plan.why_not_bounded(pykvedge.plan("kvzip-uniform"))
    assert native_plan.why_not_bounded(pykvedge.plan("h2o", scorer="replay")) == ""


# ------------------------------------------------------------------------------------------------------------


class ReplayContext(TinyContext):
    """Reads a prompt, and chunks of a second pass over it."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cache.set_auto_compress(False)

    def read_chunk_again(self, chunk, tokens, stop=None):
        n = self.n[0]
        with replaying(self.cache, chunk):
            for part in np.array_split(tokens, 1 if len(tokens) < 9 else 3):
                self.decode(part.tolist())
        self.n[0] = n

    def scores(self):
        return [libkvedge.pending_scores(self.cache, i) for i in range(len(self.cache.lengths()))]


def watched(model, prompt_tokens, again):
    """Returns [layer][H, n, T + n]: the attention of each token of a pass, read one by one after the prompt."""
    with ReplayContext(model, pykvedge.plan("full"), "f32") as context:
        context.decode(prompt_tokens)
        context.cache.watch(True)
        out = []
        for token in again:
            context.decode([token])
            out.append([
                [context.cache.attention(i, h) for h in range(4)] for i in range(len(context.cache.lengths()))
            ])  # fmt: skip
    return out


@pytest.mark.parametrize("scope", ["chunk", "context"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_pass_gathers_what_its_tokens_pay_to_the_prompt(native, tiny, kind, scope):
    model, tokens, n = tiny(kind).model, random_tokens(50), 50
    plan = pykvedge.plan("kvzip", 0.3, **{"scorer.scope": scope})
    chunks = [ReplayChunk(0, 30, 12, 3), ReplayChunk(30, 50, 7, 3)]
    with ReplayContext(model, plan, "f32") as context:
        context.decode(tokens)
        parts = [random_tokens(c.n_tokens, 7) for c in chunks]
        for chunk, part in zip(chunks, parts, strict=True):
            context.read_chunk_again(chunk, part)
        found = context.scores()
    expected = [np.zeros_like(x) for x in found]
    for c, part in zip(chunks, parts, strict=True):
        index = np.arange(n)
        within = (index >= c.first) & (index < c.last)
        for row in watched(model, tokens, part):
            for i, heads in enumerate(row):
                for h, paid in enumerate(heads):
                    scope_of = np.full(len(paid), True)
                    if scope == "chunk":
                        scope_of[:n] = within | (index < c.sinks)
                    share = np.where(scope_of, paid, 0)[:n] / paid[scope_of].sum()
                    to = expected[i][h // (len(heads) // len(expected[i]))]
                    to[:] = np.maximum(to, np.where(within | (scope == "context"), share, 0))
    for ours, its in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours[:, 3:], its[:, 3:], rtol=5e-3, atol=1e-6)
        assert (ours[:, :3] == 2).all()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4e", "qwen2vl"])
def test_nothing_is_left_of_a_pass(native, tiny, kind):
    """Later logits and a later compression equal those without a pass, bit for bit."""

    def after(twice):
        with ReplayContext(tiny(kind).model, pykvedge.plan("kvzip", 0.5), "f32", n_ctx=1024) as context:
            context.decode(random_tokens(90))
            if twice:
                context.read_chunk_again(ReplayChunk(0, 60, 80), random_tokens(80, 3))
                context.read_chunk_again(ReplayChunk(60, 90, 40), random_tokens(40, 4))
            stats = context.cache.stats()
            assert (stats.n_tokens, stats.n_pending) == (90, 90)
            context.decode(random_tokens(3, 5))
            context.decode(random_tokens(1, 6))
            return context.logits(), context.cache.lengths()

    (once, rows), (again, its) = after(False), after(True)
    np.testing.assert_array_equal(once, again)
    assert rows == its


def test_misuse_of_the_pass_is_refused_and_leaves_the_prompt(native, tiny):
    with ReplayContext(tiny("llama").model, pykvedge.plan("kvzip", 0.3, recent=0), "f32") as context:
        cache, chunk = context.cache, ReplayChunk(0, 40, 6)

        def begin(first, last, sinks, n_tokens):
            given = ReplayChunk(first, last, n_tokens, sinks)
            call("replay_begin", cache.handle, 0, ctypes.byref(given))

        with pytest.raises(StateError, match="no prompt"):
            begin(0, 1, 0, 1)
        context.decode(random_tokens(40))
        call("replay_end", cache.handle, 0)  # nothing to end
        for wrong in ((0, 41, 0, 1), (-1, 4, 0, 1), (4, 4, 0, 1), (0, 4, 41, 1), (0, 4, 0, 0)):
            with pytest.raises(UsageError, match="does not fit"):
                begin(*wrong)
        with pytest.raises(StateError, match="has read only 0 tokens"):
            begin(10, 20, 0, 1)
        with pytest.raises(StateError, match="needs a complete second pass"):
            cache.compress()
        begin(0, 40, 0, 6)
        for doing in (lambda: begin(0, 40, 0, 6), cache.compress):
            with pytest.raises(StateError, match="call kvedge_replay_end first"):
                doing()
        context.decode(random_tokens(4))
        call("replay_end", cache.handle, 0)
        context.n[0] = 40
        with pytest.raises(StateError, match="needs a complete second pass"):  # two tokens are missing
            cache.compress()
        context.read_chunk_again(chunk, random_tokens(6))
        cache.compress()
        assert {len(tokens) for layer in context.held() for tokens in layer} != {40}
        assert np.mean([len(tokens) for layer in context.held() for tokens in layer]) == 12
        with pytest.raises(StateError, match="needs an uncompressed prompt"):
            begin(0, 1, 0, 1)
        cache.set_plan(pykvedge.plan("snapkv", 0.3))
        context.decode(random_tokens(20))
        with pytest.raises(UnsupportedError, match="scorer 'window' with these settings uses no second pass"):
            begin(0, 20, 0, 1)


def test_a_program_that_knows_nothing_of_it_goes_by_the_prompts_own_queries(native, tiny):
    """The first answer token compresses the prompt. A plan that needs a pass gives an error without one."""
    for settings, works in (({"scorer": "replay"}, True), (PLAN, False)):
        with TinyContext(tiny("llama").model, pykvedge.plan("h2o", 0.2, **settings)) as context:
            context.decode(random_tokens(100))
            if works:
                context.decode([7])
                assert {len(tokens) for layer in context.held() for tokens in layer} == {21}
            else:
                with pytest.raises(AssertionError):
                    context.decode([7])
                with pytest.raises(StateError, match="needs a complete second pass"):
                    context.cache.check()


def test_a_model_whose_states_cannot_be_taken_back_is_refused(kvedge, tiny):
    done = kvedge("chat", "--model", tiny("lfm2").model, "--method", "kvzip", "--threads", 1, WORDS)
    done.failed(1, "recurrent layers")


# ------------------------------------------------------------------------------------------------------------


FEW = Sampling(max_tokens=4, temp=0.0)


def test_a_conversation_reads_its_prompts_again(native, tiny, picture_file):
    """With every kind of chunks: an answer, the budget's size, and a reported pass that is not part of the prompt."""
    files = tiny("llava")
    for settings in ({}, {"scorer.chunk": 16}, {"scorer.source": "instruction"}, {"scorer.scope": "context"}):
        with files.session(pykvedge.plan("kvzip", 0.5, **settings), undo=True) as session:
            first = say(session, WORDS, [picture_file()], FEW)
            assert first.time.replay_s > 0 and "read again in" in first.line()
            assert first.as_json()["time"]["replay_s"] > 0
            kept = [session.engine.cache.tokens(0, h) for h in range(session.engine.cache.stats().n_heads_kv)]
            n = first.tokens.prompt
            assert session.engine.cache.stats().n_tokens == n + first.tokens.generated - 1
            template = len(session.model.tokenize("USER: ")) + session.model.adds_bos
            assert all(head[: template - 1] == list(range(template - 1)) for head in kept)
            second = say(session, WORDS * 2, (), FEW)
            assert second.time.replay_s > 0
            session.undo()
            assert say(session, WORDS * 2, (), FEW).text == second.text


def test_a_later_message_that_is_kept_whole_is_read_once(native, tiny, monkeypatch):
    """A later message keeps at least 32 tokens, so a shorter message needs no second pass."""
    chunks, begin = [], libkvedge.Cache.begin_replay
    monkeypatch.setattr(
        libkvedge.Cache, "begin_replay", lambda self, chunk, *at: (chunks.append(chunk), begin(self, chunk, *at))
    )
    with tiny("llama").session(pykvedge.plan("kvzip", 0.2)) as session:
        assert say(session, WORDS * 3, (), FEW).time.replay_s > 0 and chunks
        chunks.clear()
        short = say(session, "?", (), FEW)
        assert 1 < short.tokens.prompt + FEW.max_tokens <= 32 and not chunks and short.time.replay_s == 0
        assert say(session, WORDS * 3, (), FEW).time.replay_s > 0 and chunks


def test_an_interrupted_pass_leaves_the_conversation(native, tiny):
    cancel, steps = threading.Event(), []

    def progress(what, share):
        steps.append(what)
        if what == "reading the prompt again" and cancel.wanted:
            cancel.set()

    cancel.wanted = False
    plan = pykvedge.plan("kvzip", 0.5, **{"scorer.chunk": 16})
    with tiny("llama").session(plan, undo=True, progress=progress, cancel=cancel) as session:
        say(session, WORDS * 3, (), FEW)
        held, cancel.wanted = session.engine.cache.lengths(), True
        with pytest.raises(CancelledError):
            say(session, WORDS * 3, (), FEW)
        assert steps[-1] == "reading the prompt again"
        assert session.engine.cache.lengths() == held and len(session.messages) == 2
        cancel.wanted = False
        cancel.clear()
        after = say(session, WORDS * 3, (), FEW)
    with tiny("llama").session(plan, undo=True) as session:
        say(session, WORDS * 3, (), FEW)
        assert say(session, WORDS * 3, (), FEW).text == after.text


def test_a_context_without_room_for_the_pass_says_so(native, tiny, kvedge):
    text, small = (WORDS * 2)[:330], ["--model", tiny("llama").model, "--threads", 1, "--ctx", 256, "--max-tokens", 2]
    assert kvedge("chat", *small, "--method", "snapkv", text).code == 0
    kvedge("chat", *small, "--method", "kvzip", text).failed(1, "second pass over the prompt does not fit", "--ctx")


def test_a_passage_knows_its_last_tokens():
    passage, image = Passage(), ImagePiece(None, 5, "", 5)
    for piece in (TextPiece([1, 2]), TextPiece([3]), image, TextPiece([4, 5])):
        passage.add(piece)
    assert passage.last(1) == [TextPiece([5])]
    assert passage.last(4) == [TextPiece([4, 5])]  # an image is never cut
    assert passage.last(8) == [TextPiece([3]), image, TextPiece([4, 5])]
    assert passage.last(99) == [TextPiece([1, 2, 3]), image, TextPiece([4, 5])]
    other = Passage(passage.pieces)
    other.add(TextPiece([6]))
    assert passage.last(1) == [TextPiece([5])] and other.last(2) == [TextPiece([5, 6])]
