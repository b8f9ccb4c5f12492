"""A Sequence reads prompts for sessions, the server and eval: in turns, twice, put aside and restored."""

import numpy as np
import pytest
from attached import held

import pykvedge
from pykvedge.models.composer import Composer
from pykvedge.models.model import Model, silent
from pykvedge.models.vision import TextPiece
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import ContextSize
from pykvedge.runtime.replay import Requests, parts, split
from pykvedge.runtime.sequence import Sequence

A, B = [5 + i * i % 90 for i in range(300)], [7 + i * 3 % 80 for i in range(170)]
MODEL = "name"  # model name in snapshots


@pytest.fixture
def driver(tiny, native):
    model = Model(tiny("llama", weight="f32").model)
    made = Driver(model, None, ContextSize(2048, kv_type="f32", n_seq=4), 1)
    made.take_over(pykvedge.plan("kvzip", 0.3, **{"scorer.chunk": 64}))
    yield made
    made.close()
    model.close()


def took(driver, sequence, ahead, most):
    """Reads at most `most` tokens of the next piece. Returns the number of tokens."""
    piece, want_logits = ahead
    part, rest = split(piece, most)
    driver.decode(sequence, part, want_logits and rest is None)
    return part.n_tokens


def read(driver, number, tokens):
    """Returns a sequence that has read and compressed tokens, and the logits of the last token."""
    sequence = Sequence(driver, number)
    sequence.read([TextPiece(tokens)])
    logits = driver.context.logits().copy()
    sequence.compress()
    return sequence, logits


def chunks_of(driver, sequence, tokens):
    room, requests = driver.context.room, Requests(Composer(driver.model, None))
    return list(parts(driver.cache.plan, [TextPiece(tokens)], len(tokens), room, requests, begins=True))


def test_prompts_that_are_read_in_turns_are_what_they_are_alone(driver):
    alone = {tuple(tokens): read(driver, i, tokens)[1] for i, tokens in enumerate((A, B))}
    turns = []
    for i, tokens in enumerate((A, B)):
        sequence = Sequence(driver, 2 + i)
        passes = sequence.steps([TextPiece(tokens)])
        turns.append((sequence, tokens, passes, next(passes), 50 + 20 * i))
    while turns:
        sequence, tokens, passes, ahead, most = turns.pop(0)
        n, before = took(driver, sequence, ahead, most), sequence.share
        try:
            turns.append((sequence, tokens, passes, passes.send(n), most))
            assert sequence.share > before
        except StopIteration:
            assert sequence.share == 1 and sequence.n_past == sequence.n_cells == len(tokens)
            assert np.allclose(driver.context.logits(), alone[tuple(tokens)], atol=1e-4)


def test_a_second_pass_that_is_closed_is_taken_back(driver):
    undisturbed, _ = read(driver, 0, A)
    sequence = Sequence(driver, 1)
    sequence.read([TextPiece(A)])
    chunks = chunks_of(driver, sequence, A)
    assert len(chunks) > 3
    for n_passes in (1, 3):
        passes = sequence.second_pass(chunks, keep_logits=False)
        ahead = next(passes)
        for _ in range(n_passes):
            ahead = passes.send(took(driver, sequence, ahead, 512))
        passes.close()
        assert sequence.n_past == sequence.n_cells == len(A) == driver.cache.stats(1).n_tokens
    sequence.run(sequence.second_pass(chunks, keep_logits=False), "again", silent, None)
    driver.cache.compress(1)
    assert held(driver.cache, sequence.number) == held(driver.cache, undisturbed.number)


def test_a_second_pass_leaves_the_logits_of_the_prompt(driver):
    sequence = Sequence(driver)
    sequence.read([TextPiece(A)])
    logits = driver.context.logits().copy()
    sequence.replay()
    assert sequence.replay_s > 0 and sequence.n_past == len(A)
    assert np.array_equal(driver.context.logits(), logits)
    sequence.replay()  # a second call does nothing
    assert sequence.replay_s == 0


def test_a_snapshot_and_a_copy_go_on_alike(driver):
    sequence, _ = read(driver, 0, A)
    for token in B[:5]:
        sequence.extend(token)
    restored, copy = Sequence(driver, 1), Sequence(driver, 2)
    at = sequence.snapshot(MODEL, pending=[9])
    assert at.answer == tuple(B[:5]) and at.pending == (9,) and at.n_pending == 5 and at.n_cells == len(A) + 5
    restored.restore(at, MODEL)
    copy.follow(sequence)
    said = []
    for one in (sequence, restored, copy):
        one.extend(9)
        logits = [driver.context.logits().copy()]
        one.read([TextPiece(B)])
        one.compress()
        one.extend(7)
        logits = np.array([*logits, driver.context.logits()])
        said.append((logits, held(driver.cache, one.number), one.n_past, one.measure()))
    for logits, kept, n_past, kv in said[1:]:
        assert np.array_equal(logits, said[0][0]) and kept == said[0][1] and n_past == said[0][2]
        assert kv.kept_per_layer == said[0][3].kept_per_layer
    copy.drop()
    assert driver.cache.stats(2).n_tokens == copy.n_past == 0


def test_prompts_are_measured_since_the_last_time(driver):
    sequence, _ = read(driver, 0, A)
    first = sequence.measure()
    assert first.compressed_tokens == len(A) and first.kept_of_them == round(sequence.pairs_held())
    sequence.read([TextPiece(B)])
    sequence.compress()
    second = sequence.measure()
    assert second.compressed_tokens == len(B) and 0 < second.kept_of_them < len(B)
