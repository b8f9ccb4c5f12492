"""Pruners: the library against the definitions, the definitions against loops, and the rows that a model reads."""

import itertools
import math

import numpy as np
import pytest

import pykvedge
from pykvedge import BudgetError, ImageRows, UnknownNameError, UsageError
from pykvedge.models.vision import ImagePiece
from pykvedge.plans.registry import members
from pykvedge.runtime.bounded_batch import image_positions
from pykvedge.runtime.pruning import by_library

GRIDS = [(1, 1), (1, 7), (5, 3), (12, 12), (24, 24)]
NAMES = [name for name in members("pruner") if name != "none"]
SETTINGS = [{}, {"pruner.seed": 7}, {"pruner.pivots": 9}]


def picture(down, across, width=24, seed=0, placed=True):
    """Returns rows of a smooth picture with a few outstanding patches."""
    rng = np.random.default_rng([down, across, seed])
    y, x = np.mgrid[0:down, 0:across] / max(down, across)
    waves = rng.normal(size=(6, width))
    rows = sum(w * np.sin((i + 1) * (x + i * y))[..., None] for i, w in enumerate(waves))
    for _ in range(max(1, down * across // 20)):
        rows[rng.integers(down), rng.integers(across)] += rng.normal(size=width) * 3
    rows = rows + rng.normal(size=rows.shape) * 0.05
    return ImageRows(rows.reshape(-1, width).astype(np.float32), (down, across) if placed else None)


def plan_of(name, tokens, **settings):
    known = {f"pruner.{p.name}" for p in members("pruner")[name].params}
    return pykvedge.plan("full", pruner=name, image_tokens=tokens, **{k: v for k, v in settings.items() if k in known})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_library_keeps_what_the_definition_keeps(native, name, settings):
    for (down, across), tokens, placed in itertools.product(GRIDS, (0.05, 0.25, 0.5, 0.99, 1, 10), (True, False)):
        image = picture(down, across, placed=placed)
        plan = plan_of(name, tokens, **settings)
        n = plan.image_tokens.count(len(image.rows))
        here = members("pruner")[name].prune(image, n, plan.settings("pruner"))
        there, read = by_library(plan, image, 2)
        assert here.tolist() == there.tolist(), (name, down, across, tokens)
        np.testing.assert_array_equal(read, image.rows[here])


@pytest.mark.parametrize("name", NAMES)
def test_as_many_rows_as_the_plan_says(native, name):
    """Rows are unique and ascending. Pruner grid may leave out some, so that cells are equal."""
    for (down, across), tokens in itertools.product(GRIDS, (0.001, 0.3, 0.5, 3, 10**6)):
        image = picture(down, across)
        kept, rows = by_library(plan_of(name, tokens), image, 1)
        n = plan_of(name, tokens).image_tokens.count(down * across)
        assert n == max(
            1, min(math.floor(down * across * tokens + 1e-9) if isinstance(tokens, float) else tokens, down * across)
        )
        assert len(rows) == len(kept) <= n and (len(kept) == n or (name == "grid" and len(kept) > 0.7 * n))
        assert (np.diff(kept) > 0).all() and kept[0] >= 0 and kept[-1] < down * across
        if len(kept) == down * across:
            np.testing.assert_array_equal(rows, image.rows)


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_dart_by_plain_loops(native):
    image = picture(5, 6)
    rows = image.rows.astype(np.float64)
    pivots = sorted(range(30), key=lambda i: -sum(abs(x) for x in rows[i]))[:4]
    kept = list(pivots)
    for pivot, share in zip(pivots, (3, 3, 2, 2), strict=True):
        left = [i for i in range(30) if i not in kept]
        kept += sorted(left, key=lambda i: cosine(rows[i], rows[pivot]))[:share]
    assert sorted(kept) == by_library(plan_of("dart", 14), image, 1)[0].tolist()


def test_grid_by_hand(native):
    assert by_library(plan_of("grid", 4), picture(4, 4), 1)[0].tolist() == [5, 7, 13, 15]
    assert by_library(plan_of("grid", 3), picture(1, 9, placed=False), 1)[0].tolist() == [1, 4, 7]
    assert len(by_library(plan_of("grid", 288), picture(24, 24), 1)[0]) == 288


def test_residual_by_plain_loops(native):
    rows = picture(5, 6).rows.astype(np.float64).tolist()
    known = [[sum(column) / 30 for column in zip(*rows, strict=True)]]
    kept = []
    for _ in range(11):
        left = [i for i in range(30) if i not in kept]
        kept.append(max(left, key=lambda i: min(math.dist(rows[i], k) for k in known)))
        known.append(rows[kept[-1]])
    assert sorted(kept) == by_library(plan_of("residual", 11), picture(5, 6), 1)[0].tolist()


def test_what_stands_out_comes_first(native):
    """A plain picture with four spots, two of them alike: exactly these four are kept."""
    rows = np.full((36, 8), 1.0)
    rows += np.random.default_rng(0).normal(size=rows.shape) * 0.01
    for at, to in ((3, 0), (9, 1), (20, 2), (31, 2)):
        rows[at, to] += 3
    rows[31] += 0.3
    image = ImageRows(rows.astype(np.float32), (6, 6))
    assert by_library(plan_of("residual", 4), image, 1)[0].tolist() == [3, 9, 20, 31]


@pytest.mark.parametrize("tokens", [0, 0.0, 1.5, -1, -0.5, "many", True])
def test_amounts_that_are_none(tokens):
    with pytest.raises((BudgetError, UsageError)):
        pykvedge.plan("lookm", image_tokens=tokens)


def test_a_number_alone_chooses_a_pruner_and_none_chooses_nothing():
    assert pykvedge.plan("lookm", image_tokens=0.5).pruner == "residual"
    assert pykvedge.plan("lookm").pruner == "none"
    with pytest.raises(UsageError, match="pruner"):
        pykvedge.plan("lookm", pruner="none", image_tokens=0.5)
    with pytest.raises(UnknownNameError, match=r"pruner 'maxmin'.*residual"):  # this pruner was removed
        pykvedge.plan("lookm", pruner="maxmin", image_tokens=0.5)
    plan = pykvedge.plan("mixkv", image_tokens=100, pruner="dart", **{"pruner.pivots": 3})
    assert pykvedge.Plan.from_json(plan.to_json()) == plan


# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
@pytest.mark.parametrize("method", ["full", "lookm"])
def test_a_model_reads_what_is_left(native, tiny, picture_file, kind, method):
    """Half of the image tokens are counted, stored and compressed. A second question uses the cache."""
    files = tiny(kind)
    plans = [pykvedge.plan(method, None if method == "full" else 0.5, **more) for more in ({}, {"image_tokens": 0.5})]
    reports = []
    for plan in plans:
        with files.session(plan) as session:
            answer = session.ask("What is this?", [picture_file()], pykvedge.Sampling(max_tokens=4))
            answer.read()
            reports.append(answer.report)
            session.ask("And this?", [picture_file("b.png", 90, 60)], pykvedge.Sampling(max_tokens=4)).read()
    whole, half = (r.tokens for r in reports)
    assert half.image == whole.image // 2 and half.pruned == whole.image - half.image and whole.pruned == 0
    assert half.prompt == whole.prompt - half.pruned
    assert reports[1].kv.full_bytes < reports[0].kv.full_bytes


def test_all_tokens_are_the_image_as_it_was(native, tiny, picture_file):
    """A pruner that keeps everything changes no logit."""
    answers = []
    for more in ({}, {"pruner": "dart", "image_tokens": 1.0}):
        with tiny("llava").session(pykvedge.plan("full", **more)) as session:
            answers.append(session.ask("What?", [picture_file()], pykvedge.Sampling(max_tokens=20)).read())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_rows_keep_their_places(native, tiny, picture_file, kind):
    with tiny(kind).session(pykvedge.plan("full", image_tokens=0.4)) as session:
        pieces = session.first_prompt("What?", [picture_file("c.png", 120, 80)])
        session.engine.make_room(pieces, session.plan)
        session.engine.encode(pieces, lambda what, share: None, None)
        [image] = [p for p in pieces if isinstance(p, ImagePiece)]
        mrope = session.model.has_mrope
        positions, end = image_positions(session._vision, image, 10, mrope, gaps=True)
        whole = ImagePiece(image.chunk, image.n_rows, image.key, image.n_rows)
        everything, after = image_positions(session._vision, whole, 10, mrope, gaps=True)
        assert end == after and positions.shape == (4 if mrope else 1, image.n_tokens)
        assert mrope or np.diff(positions).max() > 1
        np.testing.assert_array_equal(positions, everything[:, image.kept])
        session.engine.prefill(pieces, lambda what, share: None, None)
        memory = session.engine.context.llama.llama_get_memory(session.engine.context.handle)
        last = session.engine.context.llama.llama_memory_seq_pos_max(memory, 0)
        assert last == session.engine.context.at.n_past - 1
        assert session.engine.context.at.n_cells == sum(p.n_tokens for p in pieces)
        session.release(pieces)


def test_a_session_file_goes_on_behind_its_gaps(native, tiny, picture_file, tmp_path):
    """The file has fewer rows than positions: it loads, and the conversation goes on with the same answer."""
    plan = pykvedge.plan("knorm", 0.5, image_tokens=0.25)
    with tiny("llava").session(plan) as session, tiny("llava").session(plan) as other:
        session.ask("What is this?", [picture_file("c.png", 120, 80)], pykvedge.Sampling(max_tokens=4)).read()
        assert session.engine.context.at.n_past > session.engine.context.at.n_cells
        session.save(tmp_path / "a.kvs")
        other.load(tmp_path / "a.kvs")
        said = [s.ask("And?", (), pykvedge.Sampling(max_tokens=6)).read() for s in (session, other)]
        assert said[0] == said[1]


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_bounded_prompts_and_streams(native, tiny, picture_file, kind):
    plan = pykvedge.plan("knorm", 24, image_tokens=0.5)
    held = []
    for settings in ({}, {"bounded": True}, {"stream": True}):
        with tiny(kind).session(plan, **settings) as session:
            answer = session.ask("What is this?", [picture_file()], pykvedge.Sampling(max_tokens=3))
            answer.read()
            held.append((answer.report.tokens.image, answer.report.tokens.pruned, session.engine.cache.lengths()))
    assert held[0] == held[1] and held[0][:2] == held[2][:2]


@pytest.mark.parametrize(("amount", "code"), [("0", 2), ("1.5", 2), ("few", 2)])
def test_image_tokens_that_cannot_be(kvedge, tiny, amount, code):
    kvedge("chat", *tiny("llava").arguments(), "--image-tokens", amount, "hello").failed(code, "image_tokens")
