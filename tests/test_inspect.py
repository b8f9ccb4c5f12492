"""kvedge inspect: its measures against their definitions, its reading of a cache, and its files."""

import base64
import io
import os
import re

import numpy as np
import pytest
from choosing import whole
from PIL import Image

import pykvedge
from kvedge_lab.commands.bench import bench
from kvedge_lab.commands.calibrate import budgets
from kvedge_lab.commands.eval import evaluate
from kvedge_lab.inspect import figures, measures, overlay, report
from kvedge_lab.inspect.collect import Findings, PromptImage, collect
from pykvedge import NothingToCompressError, Picture, Plan, StateError, UsageError, load_picture
from pykvedge.library import libkvedge
from pykvedge.models.imagetokens import Places
from pykvedge.reference.stages.spectrum import cosines, high_share

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 64, 129])
def test_the_spectrum_is_that_of_the_orthonormal_dct(n_tokens):
    x = RNG.normal(size=(3, n_tokens, 8)).astype(np.float32)
    rows = np.concatenate([np.full((1, n_tokens), 1 / np.sqrt(n_tokens)), cosines(1, n_tokens, n_tokens)])
    energy = ((rows @ x.astype(np.float64)) ** 2).sum(axis=(0, 2))
    found = measures.power_spectrum(x)
    np.testing.assert_allclose(found, energy / energy.sum(), atol=1e-12)
    assert found.sum() == pytest.approx(1.0)  # Parseval
    w = max(1, int(0.2 * n_tokens))
    assert found[w:].sum() == pytest.approx(high_share(x, 0.2), abs=1e-9)
    assert not measures.power_spectrum(np.zeros((1, n_tokens, 8))).any()


def test_redundancy_is_the_mean_similarity_of_two_different_keys():
    k = (RNG.normal(size=(2, 20, 16)) + 1.0).astype(np.float32)
    unit = k / np.linalg.norm(k, axis=2, keepdims=True)
    cosine = np.einsum("htd,hud->htu", unit, unit)
    brute = [(m.sum() - np.trace(m)) / (20 * 19) for m in cosine]
    np.testing.assert_allclose(measures.head_redundancy(k), brute, rtol=1e-5)


def test_gini_runs_from_all_alike_to_one_that_holds_everything():
    assert measures.gini(np.ones(50)) == pytest.approx(0.0)
    assert measures.gini(np.eye(50)[17]) == pytest.approx(1 - 1 / 50)
    assert measures.gini(np.zeros(50)) == pytest.approx(0.0)
    x = RNG.random(40)
    pairs = np.abs(x[:, None] - x[None, :]).sum() / (2 * 40 * x.sum())  # mean difference of two tokens
    assert measures.gini(x) == pytest.approx(pairs)


def test_a_patch_is_as_bright_as_the_share_of_heads_that_keeps_it():
    white = Image.new("RGB", (40, 20), "white")
    share = np.array([[1.0, 0.5, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    drawn = np.asarray(overlay.patches(white, share))[..., 0].astype(int)
    for row in range(2):
        for column in range(4):
            cell = drawn[row * 10 : row * 10 + 10, column * 10 : column * 10 + 10]
            light = overlay.DARKEST + (1 - overlay.DARKEST) * share[row, column]
            assert (cell == round(255 * light)).all()


def test_methods_are_compared_over_the_picture_on_one_scale():
    """Two layers of one head see a white picture of two tokens. Brightness: a token's share of the most kept token."""
    rgb = bytes([255] * 3 * 40 * 20)
    image = PromptImage(Picture("white.png", 40, 20, rgb), 0, 2, Places(2, 1, False))
    kept = {"one": [[[0]], [[0]]], "other": [[[0]], [[1]]]}
    nothing = np.zeros((2, 2))
    found = Findings("m", "p", [0, 1], np.ones(2, bool), [image], nothing, nothing, nothing, nothing, np.zeros(2), kept)
    (_, _), (one, left), (other, both) = overlay.by_method(found, image)
    assert (one, other) == ("one: 50 %", "other: 50 %")

    def light(picture):
        pixels = np.asarray(picture)[..., 0]
        return [int(pixels[0, 0]), int(pixels[0, -1])]

    dark, half = round(255 * overlay.DARKEST), round(255 * (overlay.DARKEST + (1 - overlay.DARKEST) / 2))
    assert light(left) == [255, dark] and light(both) == [half, half]
    assert [label for label, _ in overlay.by_layer(found, "other", image)] == ["layer 0: 50 %", "layer 1: 50 %"]


@pytest.fixture
def findings():
    """Two layers (3 and 7 of a model) with two KV heads and four tokens."""
    importance = np.array([[4.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    spectrum_k, spectrum_v = np.array([[0.7, 0.3, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]]), np.full((2, 4), 0.25)
    kept = {"adakv": [[[0, 1, 2], [3]], [[0, 1], [2, 3]]], "h2o": [[[0, 1], [0, 3]], [[0, 1], [2, 3]]]}
    return Findings("m", "p", [3, 7], np.zeros(4, bool), [], importance, np.array([[0.1, 0.9], [0.5, 0.2]]),
                    spectrum_k, spectrum_v, np.array([0.25, 0.5]), kept)  # fmt: skip


def test_a_layer_with_fewer_heads_has_no_head_that_keeps_nothing(findings):
    findings.kept["adakv"] = [[[0, 1, 2], [3]], [[0, 1]]]
    assert [row[4] for row in report.table(findings)] == ["1 - 3", "2"]


def points(line):
    return np.array(line.get_xydata()).tolist()


def test_the_lorenz_figure_shows_curves_beside_the_diagonal(findings):
    curves, bars = figures.lorenz(findings).axes
    steep, even, diagonal = map(points, curves.lines)
    assert steep == [[0, 0], [0.25, 0.5], [0.5, 0.75], [0.75, 0.875], [1, 1]]
    assert even == [[x, x] for x in (0, 0.25, 0.5, 0.75, 1)] and diagonal == [[0, 0], [1, 1]]
    assert [text.get_text() for text in curves.figure.legends[0].texts] == ["layer 3", "layer 7"]
    assert [bar.get_height() for bar in bars.patches] == [measures.gini(row) for row in findings.importance]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["3", "7"] and bars.get_ylim() == (0, 1)


def test_the_spectrum_figure_shows_keys_and_values_up_to_the_cut(findings):
    panels = figures.spectrum(findings).axes
    for axes, rows, what in zip(panels, (findings.spectrum_k, findings.spectrum_v), ("keys", "values"), strict=True):
        *layers, cut = map(points, axes.lines)
        x = (0, 0.25, 0.5, 0.75)
        assert layers == [[[f, max(share, 1e-9)] for f, share in zip(x, row, strict=True)] for row in rows.tolist()]
        assert [f for f, _ in cut] == [0.2, 0.2] and axes.get_yscale() == "log" and axes.get_title("left") == what


def test_the_other_figures_show_their_numbers(findings):
    for figure, shown, most in (
        (figures.redundancy(findings), findings.redundancy, 1),
        (figures.budgets(findings), [[3, 1], [2, 2]], 3),
    ):
        axes = figure.axes[0]
        np.testing.assert_array_equal(axes.images[0].get_array(), shown)
        assert axes.images[0].get_clim() == (0, most)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["3", "7"]
    beside = figures.budgets(findings).axes[1]  # on the same scale
    assert beside.images[0].get_clim() == (0, 3) and (beside.images[0].get_array() == 2).all()
    assert beside.get_title("left") == "h2o"
    bars = figures.outliers(findings).axes[0].patches
    assert [bar.get_height() for bar in bars] == [0.25, 0.5]


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_rows_and_scores_are_those_of_the_cache(tiny, picture_file, kind):
    picture = load_picture(picture_file())
    before, after = {}, {}

    def look(cache, pieces):
        n = sum(p.n_tokens for p in pieces)
        for layer in range(cache.stats().n_layers):
            _, n_heads_kv, _, _ = libkvedge.shape(cache, layer)
            scores = libkvedge.pending_scores(cache, layer)
            # every query has an attention sum of 1, and a group's heads are averaged
            np.testing.assert_allclose(scores.sum(axis=1), n, rtol=1e-4)
            for head in range(n_heads_kv):
                assert [len(x) for x in libkvedge.rows(cache, layer, head)] == [n, n]

    with tiny(kind).session() as session:
        session.examine("What is this?", [picture], Plan(method="x", scorer="cumulative", budget=0.5), look)
        # evicts without merging, with different counts for each head
        plan = pykvedge.plan("adakv", 0.6, **{"scorer.window": 8})

        def compress(cache, pieces):
            places = [(i, h) for i, heads in enumerate(cache.lengths()) for h in range(len(heads))]
            before.update({at: libkvedge.rows(cache, *at) for at in places})
            cache.compress()
            after.update({at: libkvedge.rows(cache, *at) for at in places})
            with pytest.raises(StateError, match="nothing to score"):
                libkvedge.pending_scores(cache, 0)

        kept = session.examine("What is this?", [picture], plan, compress)
        for at, (k, v) in before.items():
            index = kept[at[0]][at[1]]
            assert 0 < len(index) < len(k)
            np.testing.assert_array_equal(after[at][0], k[index])
            np.testing.assert_array_equal(after[at][1], v[index])
        assert session.ask("Hello").read()  # inspect leaves nothing behind
        assert session.last_report.tokens.image == 0


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_tokens_are_those_that_a_pruner_left(tiny, picture_file, kind):
    picture = load_picture(picture_file())
    plan = pykvedge.plan("snapkv", 0.5, image_tokens=0.25, **{"scorer.window": 4})
    other = pykvedge.plan("h2o", 0.5, image_tokens=0.25)
    with tiny(kind).session(plan) as session:
        found = collect(session, "What is this?", [picture], [plan, other])
        report = session.ask("What is this?", [picture]).report
        cache, tokens = session.engine.cache, report.tokens
        lengths = cache.lengths()
        kept = [[cache.tokens(i, h) for h in range(len(heads))] for i, heads in enumerate(lengths)]
        assert tokens.pruned and (found.n_tokens, found.image_mask.sum()) == (tokens.prompt, tokens.image)
        assert found.kept["snapkv"] == kept and found.lengths("snapkv") == lengths
        [image] = found.images
        assert image.count == len(image.rows) == tokens.image and image.rows.max() < tokens.image + tokens.pruned
        for share in (0.5, 1.0):
            with pytest.raises(UsageError, match="different pruners"):
                collect(session, "What is this?", [picture], [plan, other.with_(image_tokens=share)])


def test_a_model_whose_cache_stays_with_llama_cpp_is_refused(tiny):
    with tiny("mamba").session() as session, pytest.raises(NothingToCompressError):
        session.examine("Hello", [], pykvedge.plan("full"))


@pytest.mark.parametrize("kind", ["qwen2vl", *whole("llava")])
def test_the_command_writes_a_report_that_needs_nothing_else(kvedge, tiny, picture_file, tmp_path, kind):
    out = tmp_path / "figures"
    wide = picture_file("wide.png", 160, 60)
    model = tiny(kind).arguments()
    done = kvedge("inspect", wide, *model, "--method", "lookm", "--method", "adakv", "--output", out, "--json")
    assert done.code == 0 and done.err == "", done.err
    report = done.json
    names = [f.name for f in out.iterdir()]
    assert set(names) == {f.rsplit("/", 1)[-1] for f in report["files"]}
    html = (out / "report.html").read_text(encoding="utf-8")
    assert all(s.startswith("data:") for s in re.findall(r'(?:src|href)="(.{5})', html))
    pictures = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", html)
    files = [f.read_bytes() for f in out.glob("*.png")]
    assert {"kept-image-1.png", "kept-lookm-image-1.png", "kept-adakv-image-1.png", "budgets.png"} <= set(names)
    assert sorted(base64.b64decode(p) for p in pictures) == sorted(files) and len(files) == 8
    for png in files:
        Image.open(io.BytesIO(png)).verify()
    numbers = np.load(out / "data.npz")
    n_layers, n_tokens = numbers["importance"].shape
    assert (n_tokens, int(numbers["image_mask"].sum())) == (report["tokens"]["prompt"], report["tokens"]["image"])
    for method in ("lookm", "adakv"):
        budgets = np.array(report["budgets"][method])
        assert len(budgets) == n_layers
        share = numbers[f"keep_share.{method}"]  # share of heads: the sum over all tokens is the pairs of a head
        np.testing.assert_allclose(share.sum(axis=1), budgets.mean(axis=1))


def test_numbers_alone_need_no_matplotlib(kvedge, picture_file, tmp_path):
    out = tmp_path / "numbers"
    done = kvedge("inspect", picture_file(), "--no-figures", "--output", out)
    assert done.code == 0 and [f.name for f in out.iterdir()] == ["data.npz"]
    # a matplotlib that cannot be imported
    broken = tmp_path / "broken" / "matplotlib"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError")
    code = f"import sys; sys.path.insert(0, {str(broken.parent)!r}); from pykvedge.__main__ import main; main()"
    done = kvedge("inspect", picture_file(), "--output", out, program=["-c", code])
    done.failed(1, "pip install 'kvedge[inspect]'")


def test_a_home_folder_is_meant_wherever_a_path_is_given(kvedge, picture_file, tmp_path, monkeypatch):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    done = kvedge("inspect", picture_file(), "--no-figures", "-o", "~/out", env={"HOME": str(tmp_path)})
    assert done.code == 0 and (tmp_path / "out" / "data.npz").is_file()
    for command, names in {bench: {"save", "plot", "memory_plot", "output"}, evaluate: {"save", "plot", "image_folder"},
                           budgets: {"save", "output", "data", "around"}}.items():  # fmt: skip
        given = {param.name: param.type for param in command.params}
        assert {given[name].convert("~/a", None, None) for name in names} == {tmp_path / "a"}


def test_bad_input_is_one_line(refused, picture_file, tmp_path):
    (tmp_path / "file").write_text("")
    refused("inspect", tmp_path / "none.png").failed(1, "does not exist")
    refused("inspect", picture_file(), "--method", "lokm").failed(2, "did you mean 'lookm'")
    refused("inspect", picture_file(), "--method", "h2o", "--method", "h2o").failed(2, "twice")
    refused("inspect", picture_file(), "--no-figures", "--output", tmp_path / "file").failed(2, "cannot be written")
    for below in ("file", "file/sub", "file/sub/deeper"):  # before a picture is looked for
        out = ("--no-figures", "-o", tmp_path / below)
        refused("inspect", tmp_path / "none.png", *out).failed(2, f"{below} cannot be written", "file is no folder")
    (tmp_path / "closed").mkdir(mode=0o500)
    if not os.access(tmp_path / "closed", os.W_OK):  # which a superuser may
        out = ("--no-figures", "-o", tmp_path / "closed" / "sub")
        refused("inspect", tmp_path / "none.png", *out).failed(2, "cannot be written", "closed")
    refused("inspect", picture_file(), "--threads", 0).failed(2, "--threads")
    two = ("--prompt", "<image> or <image>?", "--no-figures")
    refused("inspect", picture_file(), *two).failed(2, "2 places for images")
