"""kvedge bench: its counts against llama.cpp and the operating system, its saved results, its refusals."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
from conftest import QUICK_BENCH, THREADS
from limits import of_child
from waits import until

import pykvedge
from kvedge_lab import progress
from kvedge_lab.bench import machine, plot, runner, table, timeline
from kvedge_lab.bench.matrix import MAX_ROUNDS, Matrix, ModelFiles, Shape, Variant
from kvedge_lab.bench.measure import Repetition, make_prompt
from kvedge_lab.bench.runner import Group, Outcome, run
from kvedge_lab.commands.common import as_csv
from kvedge_lab.jsonlines import JsonLines
from kvedge_lab.progress import Steps
from pykvedge.models.encoder import Encoder
from pykvedge.models.gguf import read_header
from pykvedge.models.model import Model
from pykvedge.models.vision import Vision
from pykvedge.runtime.report import DeviceWork
from pykvedge.runtime.sequence import device_work
from pykvedge.system import memory


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Reads a small set of bytes once: test_bench_machine.py tests the speed of reading memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(machine, "SETS", (1 << 20,))
        patched.setattr(machine, "ATTEMPTS", 1)
        yield


class Shares(Steps):
    """Records the shares of a run that the progress bar shows as done."""

    def _tell(self, line, done, total):
        self.shown = [*getattr(self, "shown", []), done / total]


def measured(files, shapes, variants, **options):
    out = Outcome()
    matrix = Matrix(files, shapes, variants, threads=THREADS, **{"repeat": 2, "generate": 5, **options})
    display = Shares(enabled=False, steps=matrix.steps)
    run(matrix, JsonLines(None), out, display)
    assert display.shown[-1] == max(display.shown) == 1
    assert not out.left_out and not out.interrupted
    return out


@pytest.fixture(scope="module")
def outcome(quick, tiny, native):
    """The outcome of two methods on two prompts of a tiny model with images."""
    llava = tiny("llava")
    variants = [Variant("full", pykvedge.plan("full")), Variant("h2o", pykvedge.plan("h2o", 0.25))]
    shapes = [Shape(300), Shape(40, 2, 64, 48)]
    return measured([ModelFiles(llava.model, llava.mmproj)], shapes, variants)


def test_every_variant_is_measured_in_every_round_with_stock(outcome):
    rows = table.rows(outcome)
    assert [(r.prompt, r.variant) for r in rows] == [
        (prompt, variant) for prompt in ("300 text", "40 text + 2 images") for variant in ("stock", "full", "h2o 0.25")
    ]
    for group in outcome.groups:
        for found in group.rounds.values():
            assert len(found) == 2 and all(len(r.decode_s) == 5 and min(r.decode_s) > 0 for r in found)
    assert rows[0].decode_vs_stock == 1 and rows[0].prefill_vs_stock == pytest.approx(1, abs=0.05)
    assert all(r.rounds == 2 and r.compress_ms >= 0 for r in rows)


def test_the_peak_is_no_less_than_what_was_read_meanwhile(tiny, native, monkeypatch):
    monkeypatch.setattr(memory.PeakMeter, "start", lambda meter: None)  # takes no samples
    variants = [Variant("h2o", pykvedge.plan("h2o", 0.25))]
    for row in table.rows(measured([ModelFiles(tiny("llama").model)], [Shape(300)], variants, repeat=1)):
        assert row.rss_peak_bytes >= row.rss_after_bytes > 0


def test_bytes_are_those_of_the_buffers(outcome, tiny):
    header = read_header(tiny("llava").model)
    arch, values = header.architecture, header.values
    layers, heads = values[f"{arch}.block_count"], values[f"{arch}.attention.head_count_kv"]
    size = values[f"{arch}.embedding_length"] // values[f"{arch}.attention.head_count"]
    for row in table.rows(outcome):
        pair = layers * heads * 2 * size * 2
        if row.variant == "stock":
            assert row.kv_full_bytes == row.kv_kept_bytes == pair * (-(-(row.tokens + 6) // 256) * 256)
        else:
            assert row.kv_full_bytes >= pair * row.tokens  # blocks are whole pages
            assert row.kv_peak_bytes >= row.kv_full_bytes
        if row.variant == "h2o 0.25":
            assert pair * (row.tokens // 4) <= row.kv_kept_bytes < 0.6 * row.kv_full_bytes


def test_prompts_have_the_size_that_was_asked_for(native, closing, tiny):
    llava = tiny("llava")
    model = closing(Model(llava.model))
    vision = Vision(closing(Encoder(llava.mmproj, model, THREADS, False, False)))
    one, two = (make_prompt(model, vision, Shape(41, n, 64, 48), 7) for n in (1, 2))
    assert one.n_tokens - one.n_image_tokens >= 41 and len(one.then) == 7
    assert two.n_image_tokens == 2 * one.n_image_tokens > 0
    text = make_prompt(model, vision, Shape(41), 7)
    assert text.n_tokens == 41 and text.n_image_tokens == 0
    for prompt in (one, two):
        vision.release(prompt.pieces)


def test_stock_is_llama_cpp_without_a_provider(tiny, native, monkeypatch):
    """The variant stock never attaches; every other variant always does."""
    from pykvedge.runtime import driver

    attached = []
    real = driver.Cache

    def noted(*arguments, **options):
        attached.append(arguments[1].method)
        return real(*arguments, **options)

    monkeypatch.setattr(driver, "Cache", noted)
    measured([ModelFiles(tiny("llama").model)], [Shape(50)], [Variant("full", pykvedge.plan("full"))], repeat=1)
    assert attached == ["full"] * 2  # warm-up and one round, and none for stock


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RSS as Linux counts it")
def test_memory_of_a_long_prompt_is_seen_in_rss(tiny, native):
    """llama.cpp's cache is allocated at once and stays; kvedge's cache shrinks with the compression."""
    model = ModelFiles(tiny("llama", n_layers=4, n_heads=4, n_heads_kv=4, head_size=128, weight="q8_0").model)
    out = measured([model], [Shape(1800)], [Variant("h2o", pykvedge.plan("h2o", 0.1))], repeat=1, generate=2)
    stock, h2o = table.rows(out)
    assert stock.kv_kept_bytes > 14e6
    assert stock.rss_after_bytes > 0.8 * stock.kv_kept_bytes
    assert h2o.kv_kept_bytes < 0.11 * h2o.kv_full_bytes
    assert h2o.rss_after_bytes < stock.rss_after_bytes - 0.5 * stock.kv_kept_bytes
    assert h2o.rss_peak_bytes > h2o.kv_full_bytes


# --------------------------------------------------------------------------------------------------- arithmetic


def repetition(prefill, decode, compress=0.0, **figures):
    return Repetition(prefill, compress, [decode] * 3, **{"tokens": 100, **figures})


def made_up(**changes):
    """Returns an outcome: stock and a method in three rounds; the machine is twice as slow in the second round."""
    stock, method = Variant("stock"), Variant("h2o", pykvedge.plan("h2o", 0.5))
    fewer = Variant("h2o", pykvedge.plan("h2o", 0.5, image_tokens=0.25))
    group = Group("m", Shape(20, 1), 100, 80, 0.25, 0.5, 800, 2)
    group.rounds = {
        stock: [repetition(1.0 * s, 0.10 * s, decode_j=6.0) for s in (1, 2, 1)],
        method: [repetition(0.8 * s, 0.05 * s, 0.2 * s, kept_bytes=100, decode_j=3.0) for s in (1, 2, 1)],
        fewer: [repetition(0.2 * s, 0.05, 0.1 * s, tokens=40, prune_s=0.05 * s, again_s=0.01 * s) for s in (1, 2, 1)],
    }
    out = Outcome({"cpu": "c", "threads": 1}, [group], **changes)
    out.bandwidth = machine.Bandwidth(1)
    out.bandwidth._measured = dict.fromkeys(machine.SETS, 9000.0)
    return out


def test_medians_ratios_and_limits():
    stock, h2o, fewer = table.rows(made_up())
    assert (stock.prefill_tok_s, stock.decode_tok_s) == pytest.approx((100, 10))
    assert (h2o.prefill_tok_s, h2o.decode_tok_s, h2o.compress_ms) == pytest.approx((125, 20, 200))
    assert h2o.decode_vs_stock == pytest.approx(2) and h2o.prefill_vs_stock == pytest.approx(1)
    assert h2o.first_token_s == pytest.approx(1.25) and h2o.first_token_vs_stock == pytest.approx(1.2)
    assert (fewer.tokens, fewer.image_tokens) == (40, 20) and fewer.prefill_tok_s == pytest.approx(200)
    assert (fewer.encode_s, fewer.prune_ms, fewer.image_again_s) == pytest.approx((0.25, 50, 0.35))
    assert fewer.first_token_s == pytest.approx(0.6) and fewer.first_token_vs_stock == pytest.approx(1.5 / 0.6)
    assert (stock.encode_s, stock.first_token_s) == pytest.approx((0.5, 1.5))
    assert fewer.again_s == pytest.approx(0.01) and h2o.again_s is None
    assert stock.limit_tok_s == pytest.approx(9000 / (800 + 2 * 100)) and h2o.limit_tok_s == pytest.approx(9000 / 900)
    assert (stock.decode_j_token, h2o.decode_j_token, h2o.prefill_j_token) == (2, 1, None)
    low, high = h2o.decode_spread
    assert low == pytest.approx(10) and high == pytest.approx(20)


def drawn(rows, chart):
    """Returns the bars of a chart, as matplotlib objects."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axis = pyplot.subplots()
    plot._chart(axis, plot._charts(rows)[chart], rows)
    pyplot.close(figure)
    return axis.patches


def on_a_device():
    """Returns an outcome with rows on a device: one method is compressed there, another one on the host."""
    made = made_up()
    group = made.groups[0]
    stock, h2o, fewer = group.rounds
    for i, one in enumerate(group.rounds[h2o]):
        one.device = DeviceWork(True, "", 1200, 300, 40, *(0.001 * (i + 1) * step for step in (1, 2, 3, 4, 5)))
        one.device_rows, one.later_s = 400, 0.1
    for one in group.rounds[fewer]:
        one.device, one.device_rows = DeviceWork(False, "scorer mine has no graph", 25600), 400
    for one in group.rounds[stock]:
        one.full_bytes, one.later_s = 1000, 0.3
    group.device_peaks = {stock: 1500, h2o: 1600}
    return made


def test_the_work_of_a_device_is_told_in_seconds():
    steps = {"measure": 1, "choose": 2, "gather": 3, "merge": 4, "upload": 5}
    figures = {"compressed": 1, "fetched_bytes": 12, "sent_bytes": 3, "operations": 7}
    figures |= {f"{name}_us": seconds * 10**6 for name, seconds in steps.items()}
    stats = SimpleNamespace(**{f"device_{name}": n for name, n in figures.items()})
    cache = SimpleNamespace(stats=lambda sequence: stats, device_problem=lambda sequence: "")
    assert device_work(cache) == DeviceWork(True, "", 12, 3, 7, *steps.values())


def test_a_compression_on_a_device():
    made = on_a_device()
    stock, h2o, fewer = table.rows(made)
    assert [row.device_compressed for row in (stock, h2o, fewer)] == [None, True, False]
    assert (h2o.device_fetched_row, fewer.device_fetched_row, stock.device_fetched_row) == (3, 64, None)
    steps = [getattr(h2o, f"device_{step}_ms") for step in table.STEPS]
    assert steps == pytest.approx([2, 4, 6, 8, 10]) and h2o.device_operations == 40  # the second of three rounds
    assert (h2o.later_s, h2o.later_vs_stock, fewer.later_s) == (pytest.approx(0.1), pytest.approx(3), None)
    # 500 bytes beside stock's cache of 1000
    assert (stock.device_peak_vs_cache, h2o.device_peak_vs_cache) == (1, pytest.approx(1.1))
    assert fewer.device_peak_bytes is fewer.device_peak_vs_cache is None
    said = table.as_markdown([stock, h2o, fewer], made)
    assert "h2o 0.5, residual 0.25 was compressed on the host: scorer mine has no graph." in said
    assert "| 3.0 B " in said and "| 64.0 B " in said and "| there " in said and "| 1.10 x" in said
    assert "| operations |" not in table.as_markdown(table.rows(made_up()), made_up())
    bars = drawn([stock, h2o, fewer], 3)
    assert len(bars) == 3 + 3 * len(table.STEPS)  # the bars of stock have no length
    widths = [bar.get_width() for bar in bars[-2 * len(table.STEPS) : -len(table.STEPS)]]
    assert widths == pytest.approx([2, 4, 6, 8, 10])


# ------------------------------------------------------------------------------------------------ forms and files


def test_forms_of_the_table():
    made = made_up()
    rows = table.rows(made)
    variants = [json.loads(line)["variant"] for line in table.as_jsonl(rows).splitlines()]
    assert variants == ["stock", "h2o 0.5", "h2o 0.5, residual 0.25"]
    listed = list(csv.DictReader(io.StringIO(as_csv(rows, "_spread"))))
    assert [float(r["decode_spread_low"]) for r in listed] == [pytest.approx(r.decode_spread[0]) for r in rows]
    assert json.loads(table.as_json(rows, made))["rows"][1]["decode_tok_s"] == pytest.approx(20)
    said = table.as_markdown(rows, made)
    assert max(map(len, said.splitlines())) <= 80
    assert "| talk again |" in said and "| 0.01 s " in said
    assert "| stock " in said and "stock: llama.cpp's attention" in said and "J/token" in said


def test_the_program_measures_saves_and_draws(kvedge, tiny, native, tmp_path):
    llava, save = tiny("llava"), tmp_path / "raw.jsonl"
    arguments = ["bench", *llava.arguments(), "--method", "snapkv", "--budget", "0.2", "--tokens", "64", "--images",
                 "0,1", "--image-size", "64x64", "--repeat", 1, "--generate", 3]  # fmt: skip
    picture = tmp_path / "m.png"
    done = kvedge(*arguments, "--json", "--save", save, "--plot", tmp_path / "p.html", "--memory-plot", picture)
    assert done.code == 0, done
    assert picture.read_bytes().startswith(b"\x89PNG") and b"<svg" in (tmp_path / "p.html").read_bytes()
    rows = done.json["rows"]
    assert [(r["prompt"], r["variant"]) for r in rows] == [
        (p, v) for p in ("64 text", "64 text + 1 image") for v in ("stock", "full", "snapkv 0.2")
    ]
    assert done.json["machine"]["threads"] == THREADS and done.json["machine"]["cpu"]
    header, *raw = [json.loads(line) for line in save.read_text().splitlines()]
    assert header["kvedge_bench"] == 1 and len(raw) == 6 and all(len(r["decode_s"]) == 3 for r in raw)
    assert [r["kept_bytes"] for r in raw] == [r["kv_kept_bytes"] for r in rows]
    kvedge(*arguments, "--save", save).failed(2, "raw.jsonl exists")
    kvedge(*arguments, "--memory-plot", tmp_path / "m.bmp").failed(2, "--memory-plot must end in .png")
    kvedge(*arguments, "--memory-plot", tmp_path / "no" / "m.png").failed(2, "does not exist")


def test_fewer_image_tokens_and_a_second_conversation(kvedge, tiny, native):
    arguments = ["bench", *tiny("llava").arguments(), "--method", "snapkv", "--budget", "0.5", "--images", "2",
                 "--repeat", 1, "--generate", 2, "--image-tokens", "0.5,4", "--again", "--json"]  # fmt: skip
    stock, *rows = kvedge(*arguments, script=QUICK_BENCH).json["rows"]
    assert [r["image_tokens"] for r in (stock, *rows)] == [32, 32, 16, 8, 32, 16, 8]
    assert stock["again_s"] is None and all(r["again_s"] > 0 for r in rows)
    kvedge(*arguments[:-1], "--image-tokens", "1.5").failed(2, "image_tokens")
    kvedge(*arguments[:-1], "--pruner", "best").failed(2, "pruner")


def test_whole_rows_are_counted_and_a_later_message_is_timed(kvedge, tiny, native):
    files = tiny("llava")
    small = ["bench", "--model", files.model, "--images", 0, "--tokens", 300, "--method", "snapkv", "--budget", 0.2]
    more = ["--repeat", 1, "--generate", 4, "--later", 6, "--keep", "ram", "--json"]
    out = kvedge(*small, *more, script=QUICK_BENCH).json
    full, plain, kept = (row for row in out["rows"] if row["method"] != "stock")
    assert [row["variant"] for row in (full, plain, kept)] == ["full", "snapkv 0.2", "snapkv 0.2, keep ram"]
    assert kept["kv_kept_bytes"] == plain["kv_kept_bytes"] and plain["kv_whole_bytes"] == full["kv_whole_bytes"] == 0
    assert full["kv_kept_bytes"] <= kept["kv_whole_bytes"] < 1.3 * full["kv_kept_bytes"]
    assert kept["kv_whole_file_bytes"] == 0 and min(row["later_s"] for row in (full, plain, kept)) > 0


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    rows = table.rows(made_up())
    assert [bar.get_width() for bar in drawn(rows, 0)] == [row.decode_tok_s for row in rows]
    rows[1].variant = "<h2o> & more"
    for name in ("a.svg", "a.html", "a.png"):
        plot.check(tmp_path / name)
        plot.write(tmp_path / name, rows, ["a < b"])
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page and "&lt;h2o&gt; &amp; more" in page and "a &lt; b" in page
    assert "max-width:100%" in page  # the picture fits its page
    assert "<script" not in page and "<link" not in page and 'href="http' not in page  # nothing from elsewhere
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 500
    for name in ("a.svg", "a.html"):
        with pytest.raises(pykvedge.KvedgeError, match="cannot be written"):
            plot.write(tmp_path / "no" / name, rows, [])


def test_pictures_want_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(pykvedge.UsageError, match=r"needs matplotlib: pip install 'kvedge\[plot\]'"):
        plot.check(tmp_path / "a.png")
    with pytest.raises(pykvedge.UsageError, match=r"not '\.bmp'"):
        plot.check(tmp_path / "a.bmp")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_keeps_what_was_measured(environment, tiny, native, tmp_path):
    save = tmp_path / "raw.jsonl"
    program = [sys.executable, QUICK_BENCH, "bench", *tiny("llama").arguments(), "--tokens", "200", "--method",
               "h2o", "--repeat", "100000", "--save", str(save)]  # fmt: skip
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        until(lambda: save.exists() and save.read_bytes().count(b"\n") >= 8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    assert "| stock" in out and "Stopped before the end." in out
    assert all(json.loads(line) for line in save.read_text().splitlines())


def test_what_fails_is_left_out_and_said(tiny, native):
    mamba, llama = ModelFiles(tiny("mamba").model), ModelFiles(tiny("llama").model)
    out = Outcome()
    variants = [Variant("h2o", pykvedge.plan("h2o"))]
    run(Matrix([mamba, llama], [Shape(30)], variants, repeat=1, generate=2, threads=THREADS), JsonLines(None), out)
    assert len(out.left_out) == 1 and "h2o 0.2 left out" in out.left_out[0]
    assert [r.variant for r in table.rows(out)] == ["stock", "stock", "h2o 0.2"]


def test_cancelling_before_the_start(tiny, native):
    out, cancel = Outcome(), threading.Event()
    cancel.set()
    run(Matrix([ModelFiles(tiny("llama").model)], [Shape(30)], []), JsonLines(None), out, cancel=cancel)
    assert out.interrupted and table.rows(out) == []


def test_prompts_that_no_memory_holds_are_left_out_before_they_are_made(tiny, native, monkeypatch):
    """The text and the pictures of a prompt are made only if a variant can hold them."""
    made, llava = [], tiny("llava")
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 << 30)
    monkeypatch.setattr(runner, "make_prompt", lambda *given, **_: made.append(given[2].name) or 1 / 0)
    shapes, out = [Shape(99_999_999), Shape(8, 99_999_999), Shape(8, 20_000, 336, 336)], Outcome()
    run(Matrix([ModelFiles(llava.model, llava.mmproj)], shapes, [], threads=THREADS), JsonLines(None), out)
    assert not made and not out.groups and len(out.left_out) == 3
    for line, shape in zip(out.left_out, shapes, strict=True):
        assert f"{shape.name} left out: not enough memory: " in line and "use fewer --tokens or --images" in line
    with pytest.raises(ZeroDivisionError):
        run(Matrix([ModelFiles(llava.model, llava.mmproj)], [Shape(8, 2)], [], threads=THREADS), JsonLines(None), out)
    assert made == ["8 text + 2 images"]


def test_a_long_repetition_says_what_it_does(tiny, native, monkeypatch, capsys):
    """Each piece of a prompt that is made, and each pass that is read, may be told."""
    monkeypatch.setattr(progress, "FILE_S", 0.0)
    out, matrix = Outcome(), Matrix([ModelFiles(tiny("llama").model)], [Shape(1500)], [], repeat=1, generate=600)
    run(matrix, JsonLines(None), out, Steps(enabled=True, steps=matrix.steps))
    told = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert "1500 text: making the prompt" in told
    assert [what for what in told if what.startswith("reading the prompt, ") and what[20] not in "01"]
    assert [what for what in told if what.startswith("generating, ")][-3:] == [
        "generating, 0 %", "generating, 43 %", "generating, 85 %",
    ]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="resource limits")
def test_a_disk_that_fills_up_keeps_whole_lines(kvedge, tiny, native, tmp_path):
    save, limit = tmp_path / "raw.jsonl", 4000
    arguments = ["bench", *tiny("llama").arguments(), "--tokens", 40, "--method", "h2o", "--repeat", 100000,
                 "--generate", 2, "--quiet", "--save", save]  # fmt: skip
    done = kvedge(*arguments, script=QUICK_BENCH, preexec_fn=of_child(limit))
    assert done.code == 1 and "| stock" in done.out
    said = [line for line in done.err.splitlines() if not line.startswith("kvedge: warning: ")]  # of a busy machine
    assert len(said) == 1 and "raw.jsonl cannot be written: File too large" in said[0]
    lines = save.read_bytes()
    assert 2000 < len(lines) <= limit and lines.endswith(b"\n")
    assert all(json.loads(line) for line in lines.splitlines())


def test_bad_input(refused, tiny, tmp_path):
    llama = ["bench", *tiny("llama").arguments()]
    refused(*llama, "--method", "lokm").failed(2, "did you mean 'lookm'")
    refused(*llama, "--tokens", "12,x").failed(2, "--tokens takes numbers from 2, not 'x'")
    refused(*llama, "--tokens", "999999999,8", "--images", "999999999", "--mmproj", "none.gguf").failed(
        2, "a prompt of 999999999 text + 999999999 images is too long; use fewer --tokens or --images"
    )
    refused(*llama, "--images", "1").failed(2, "--mmproj")
    refused(*llama, "--image-size", "10").failed(2, "WIDTHxHEIGHT")
    refused(*llama, "--kv-type", "f61").failed(2, "unknown kv_type 'f61'")
    refused(*llama, "--repeat", "0").failed(2, "--repeat must be at least 1")
    refused(*llama, "--budget", "0.2,0.20").failed(2, "2 variants have the same name 'kvedge 0.2'")
    refused(*llama, "--tokens", "8,08").failed(2, "2 prompts have the same name '8 text'")
    refused(*llama, *llama[1:]).failed(2, "2 models have the same name")
    refused(*llama, "--plot", "a.gif").failed(2, "--plot must end in")
    refused(*llama, "--plot", "nowhere/a.svg").failed(2, "the folder nowhere does not exist")
    (tmp_path / "t.md").mkdir()
    refused(*llama, "--output", tmp_path / "t.md").failed(2, "t.md is a folder; name a file")
    refused(*llama, "--mmproj", "a", "--mmproj", "b").failed(2, "1 model and 2 image encoders")
    refused("bench", "--model", "none.gguf").failed(1, "none.gguf does not exist")


def test_short_rounds_are_followed_by_more(tiny, native):
    model, variants = ModelFiles(tiny("llama").model), [Variant("h2o", pykvedge.plan("h2o", 0.5))]
    [group] = measured([model], [Shape(20)], variants, repeat=1, fill_s=600.0, generate=1).groups
    assert [len(found) for found in group.rounds.values()] == [MAX_ROUNDS] * 2
    [group] = measured([model], [Shape(20)], variants, repeat=1, fill_s=1e-9, generate=1).groups
    assert [len(found) for found in group.rounds.values()] == [1] * 2


# ------------------------------------------------------------------------------------------- a busy machine


@pytest.mark.parametrize(("others_s", "threads", "disturbed"), [(0.1, 2, False), (4.0, 2, True), (4.0, 1, False)])
def test_a_machine_that_is_too_busy_for_a_figure_is_said(others_s, threads, disturbed):
    made = made_up()
    made.machine = {**made.machine, "threads": threads, "cores": 2}
    for found in made.groups[0].rounds.values():
        for one in found:
            one.others_s, one.wall_s = others_s / len(found), 10.0 / len(found)
    rows = table.rows(made)
    assert [r.disturbed for r in rows] == [disturbed] * 3
    assert rows[0].others == pytest.approx(others_s / 10 / 2)
    said = table.as_markdown(rows, made)
    assert ("| stock ? " in said) == ("Disturbed: " in said) == bool(table.warnings(rows)) == disturbed


def test_phases_lie_over_each_other_however_long_they_took():
    """The second variant is twice as slow, and compresses; the first variant does not."""
    axis = pytest.importorskip("matplotlib.figure").Figure().subplots()
    mib = 2**20
    stock = timeline.Trace("p", Variant("stock"), [0, 1, 2, 3, 9], [0, mib, 2 * mib, 2 * mib, 0],
                           [("prefill", 0, 2), ("decode", 2, 3)])  # fmt: skip
    ours = timeline.Trace("p", Variant("h2o", pykvedge.plan("h2o", 0.5)), [0, 2, 4, 5, 7], [0, mib, 2 * mib, mib, mib],
                          [("prefill", 0, 4), ("compress", 4, 5), ("decode", 5, 7)])  # fmt: skip
    timeline._panel(axis, [stock, ours])
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert drawn["h2o 0.5"] == [[0, 0], [0.5, 1], [1, 2], [2, 1], [3, 1]]
    assert drawn["stock"][:2] == [[0, 0], [0.5, 1]] and drawn["stock"][-1] == [3, 2]  # nothing is drawn after the end
    ticks = [label.get_text() for label in axis.get_xticklabels()]
    assert ticks == ["prefill\n2,000 - 4,000", "compress\n1,000 - 1,000", "decode\n1,000 - 2,000"]
