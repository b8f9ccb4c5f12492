"""kvedge eval's perplexity of the full cache equals that of unpatched llama.cpp, computed without kvedge."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import THREADS
from eval_runs import MMPROJ, MODEL, prompt, run
from hubs import rewritten

import pykvedge
from kvedge_lab.eval import table
from kvedge_lab.eval.measure import Preparer
from kvedge_lab.eval.runner import FULL, full_cell
from kvedge_lab.eval.tasks import DialogMessage, Sample, demo_samples
from pykvedge.models.composer import Composer


def stock_perplexity(worker, stock_env, model, cases, exact=False):
    job = {"model": str(model), "exact": exact, "cases": cases}
    [out] = worker("perplexity_worker.py", job, env=stock_env)
    return math.exp(sum(out["nll"]) / sum(out["tokens"])), out["tokens"]


def encoded(samples, folder, model=MODEL, mmproj=MMPROJ):
    """Returns, for each sample, the files with the embeddings of its images."""
    from pykvedge.models.vision import ImagePiece

    out = []
    with pykvedge.Session(model, mmproj, threads=THREADS) as session:
        preparer = Preparer(session.model, session._vision)
        for i, sample in enumerate(samples):
            prepared = preparer.prepare(sample)
            files = []
            for piece in (p for pieces, _ in prepared.turns for p in pieces if isinstance(p, ImagePiece)):
                files.append(str(folder / f"{i}-{len(files)}.npy"))
                np.save(files[-1], piece.embeddings)
            preparer.release(prepared.turns)
            out.append(files)
    return out


def segments(text, marker, files):
    """Returns the rendered prompt, cut at its images."""
    parts = text.split(marker)
    assert len(parts) == len(files) + 1
    made = []
    for part, file in zip(parts, [*files, None], strict=True):
        made += [{"text": part}] if part else []
        made += [{"embeddings": file}] if file else []
    return made


def check_against_stock(samples, model, worker, stock_env, folder, kv_type="f16"):
    """Checks that stock llama.cpp's cache gives the perplexity of the full cache. Returns the perplexity."""
    rows = run(samples, [], model, kv_type=kv_type, answers=False)
    [line] = [x for x in table.lines(rows, samples, [full_cell()]) if x.task == table.ALL]
    cases = []
    for sample, files in zip(samples, encoded(samples, folder, model), strict=True):
        turns = [{"role": m.role, "content": m.content("<M>")} for m in sample.messages()]
        cases.append({"segments": segments("<s>" + prompt(turns), "<M>", files), "answer": " " + sample.answer})
    expected, tokens = stock_perplexity(worker, stock_env, model, cases, kv_type == "f32")
    assert tokens == [rows[s.id, FULL, "1.0"]["tokens"] for s in samples]
    assert line.ppl == pytest.approx(expected, abs=1e-3)
    return expected


def test_perplexity_is_that_of_stock_llama_cpp_on_the_demo_model(native, worker, stock_env, tmp_path):
    samples = [s for t in ("where", "describe", "code", "difference") for s in demo_samples(t, 2, 0, 4)]
    check_against_stock(samples, MODEL, worker, stock_env, tmp_path)


def test_perplexity_is_that_of_stock_llama_cpp_for_unlikely_answers(native, worker, stock_env, tmp_path):
    """Wrong answers, so that the figure is far from 1. All in f32, because stock's flash attention sums in f16."""
    samples = demo_samples("where", 6, 4, 4) + demo_samples("difference", 2, 4, 4)
    others = [s.answer for s in demo_samples("where", 6, 9, 4) + demo_samples("difference", 2, 9, 4)]
    wrong = [replace(s, answer=a) for s, a in zip(samples, others, strict=True)]
    # Q8_0 rounds activations to 8 bits, which enlarges small differences
    model = rewritten(MODEL, tmp_path / "f32.gguf", widened=True)
    assert check_against_stock(wrong, model, worker, stock_env, tmp_path, "f32") > 1.5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_perplexity_is_that_of_stock_llama_cpp_on_random_weights(tiny, native, worker, stock_env, kind):
    model = tiny(kind).model
    samples = [
        Sample(
            f"s{i}", "text", (DialogMessage("user", f"What is {i} and {i + 1}?"),), f"It is a {word} thing, {i}.", "ppl"
        )
        for i, word in enumerate(["red", "very long", "quite unlikely", "7KE4"])
    ]
    rows = run(samples, [], model, None)
    [line] = [x for x in table.lines(rows, samples, [full_cell()]) if x.task == table.ALL]
    with tiny(kind).session() as session:
        composer = Composer(session.model, None)
        texts = [composer.first(s.messages()).text for s in samples]
        lead = composer.lead
    cases = [{"segments": [{"text": t}], "answer": lead + s.answer} for t, s in zip(texts, samples, strict=True)]
    expected, _ = stock_perplexity(worker, stock_env, model, cases)
    assert line.ppl == pytest.approx(expected, rel=1e-3)
