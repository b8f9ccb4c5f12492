"""kvedge eval with several questions about one context, separately or one after the other."""

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from eval_runs import run

import pykvedge
from kvedge_lab.demo_tasks.tasks import ask_code, ask_where
from kvedge_lab.eval.datasets import DatasetError, load
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.metrics import paired_interval, score_interval
from kvedge_lab.eval.runner import FULL, full_cell
from kvedge_lab.eval.table import ALL, lines
from kvedge_lab.eval.tasks import DialogMessage, Sample, demo_samples
from pykvedge.errors import UnknownNameError, UsageError

QUESTIONS = ("What is the code?", "Describe the image.", "How many circles are there?")
CELLS = [Cell(name, pykvedge.plan(name, 0.3)) for name in ("snapkv", "knorm", "prefixkv")]
CELLS.append(Cell("h2o", pykvedge.plan("h2o", 0.2, decode="heavy-hitter")))
CELLS.append(Cell("half", pykvedge.plan("lookm", 0.3, image_tokens=0.5)))


def asked(count, context="scene"):
    [sample] = demo_samples("code", 1, 3, 4)
    picture = sample.lines[0].images
    return [
        replace(sample, id=f"{context}/{i}", context=context, lines=(DialogMessage("user", text, picture),))
        for i, text in enumerate(QUESTIONS[:count])
    ]


def without_time(rows):
    return {key: {k: v for k, v in row.items() if k != "seconds"} for key, row in rows.items()}


def test_each_question_is_answered_as_if_it_were_alone(native):
    together = without_time(run(asked(3), CELLS, compress="context"))
    apart = without_time(run([replace(one, context="") for one in asked(3)], CELLS, compress="context"))
    backwards = without_time(run(asked(3)[::-1], CELLS, compress="context"))
    assert len(together) == 3 * (1 + len(CELLS))
    assert {row["answer"] for row in together.values() if row["method"] == FULL} != {""}
    for key, row in together.items():
        for other in (apart[key], backwards[key]):
            figures = {k: v for k, v in other.items() if k not in ("nll", "kld", "klds")}
            assert {k: row[k] for k in figures} == figures
            assert (row["nll"], row["kld"]) == pytest.approx((other["nll"], other["kld"]), abs=1e-4)
            assert row.get("klds", []) == pytest.approx(other.get("klds", []), abs=1e-4)
    for name in ("snapkv", "knorm"):
        kept = {row["kept"] for (_, method, _), row in together.items() if method == name}
        assert len(kept) == 1


@pytest.mark.parametrize("compress", ["prompt", "context", "conversation"])
def test_a_text_before_the_picture_is_read_with_its_own_question(native, compress):
    texts = ("<image>\nWhat is the code?", "How many circles are there? <image> Say the number.")
    samples = [replace(one, lines=(replace(one.lines[0], text=text),))
               for one, text in zip(asked(2), texts, strict=True)]  # fmt: skip
    together = without_time(run(samples, CELLS[:1], compress=compress))
    assert together == without_time(run([replace(one, context="") for one in samples], CELLS[:1], compress=compress))


def test_the_whole_budget_is_the_full_cache(native):
    rows = run(asked(2), [Cell("all", pykvedge.plan("snapkv", 1.0))], compress="context")
    for one in asked(2):
        assert rows[one.id, "all", "1.0"]["answer"] == rows[one.id, FULL, "1.0"]["answer"]
        assert rows[one.id, "all", "1.0"]["kld"] == pytest.approx(0, abs=1e-6)


def test_questions_in_a_file(tmp_path, native):
    (tmp_path / "a.png").write_bytes((pykvedge_examples() / "scene-1.png").read_bytes())
    code = {"question": "What is the code?", "answer": "A1", "metric": "contains"}
    pick = {"question": "Which?", "answer": "two", "choices": ["one", "two"], "max_tokens": 3, "task": "pick"}
    data = {"id": "s", "images": ["a.png"], "task": "both", "questions": [code, pick]}
    said = {"messages": [{"role": "user", "content": "Read this."}, {"role": "assistant", "content": "Yes."}],
            "questions": [{"question": "Is it good?", "answer": "yes"}]}  # fmt: skip
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(data) + "\n" + json.dumps(said) + "\n")
    first, second, third = load(file)
    assert (first.id, second.id, third.id) == ("d:s/1", "d:s/2", "d:2/1")
    assert first.context == second.context == "d:s" and third.context == "d:2"
    assert (first.task, second.task, second.max_tokens, second.metric) == ("both", "pick", 3, "choice")
    assert first.lines[0].images == second.lines[0].images == (tmp_path / "a.png",)
    assert [line.role for line in third.lines] == ["user", "assistant", "user"]
    assert third.lines[-1].text == "Is it good?"
    assert len(run([first, second], [CELLS[1]], compress="context")) == 4


def pykvedge_examples():
    from conftest import ROOT

    return ROOT / "examples"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"questions": []}, "must be a list of objects"), ({"questions": "x"}, "must be a list of objects"),
        ({"questions": [5]}, "must be a list of objects"),
        ({"questions": [{"question": "a"}]}, "'answer' must be a text"),
        ({"questions": [{"answer": "a"}]}, "exactly one of 'messages' and 'question'"),
        ({"question": "x", "questions": [{"question": "a", "answer": "b"}]}, "exclude each other"),
        ({"answer": "x", "questions": [{"question": "a", "answer": "b"}]}, "exclude each other"),
        ({"questions": [{"question": "a", "answer": "b", "images": []}]}, "unknown column"),
        ({"messages": 5, "questions": [{"question": "a", "answer": "b"}]}, "'messages' must be a list"),
        ({"messages": [], "questions": [{"answer": "b"}]}, "'question' must be a text"),
    ],
)  # fmt: skip
def test_questions_that_are_none(tmp_path, data, what):
    (tmp_path / "d.jsonl").write_text(json.dumps(data))
    with pytest.raises(DatasetError, match=what):
        load(tmp_path / "d.jsonl")


def test_questions_about_a_context_count_as_one():
    """Contexts of three questions count as one each: means and intervals over contexts, compared with loops."""
    rng, rows, samples = Random(3), {}, []
    for i in range(7):
        for k in range(3):
            samples.append(Sample(f"{i}/{k}", "t", (DialogMessage("user", "?"),), "a", context=str(i)))
            for name in (FULL, "m"):
                rows[f"{i}/{k}", name, "1.0"] = {
                    "id": f"{i}/{k}", "method": name, "budget": 1.0, "score": float(rng.random() < 0.6),
                    "kept": 10.0 + i, "prompt_tokens": 20, "kept_bytes": 5, "nll": rng.random(), "tokens": 1 + k,
                    "kld": 0.1 * k, "top1": 1,
                }  # fmt: skip
    cells = [full_cell(), Cell("m", replace(pykvedge.plan("knorm", 1.0)))]
    of = {(line.method, line.task): line for line in lines(rows, samples, cells)}
    mine, full = of["m", ALL], of[FULL, ALL]

    def column(name, key, fold):
        return np.array([fold([rows[f"{i}/{k}", name, "1.0"][key] for k in range(3)]) for i in range(7)])

    scores = [column(name, "score", np.mean) for name in ("m", FULL)]
    assert (mine.samples, mine.contexts, full.contexts) == (21, 7, 7)
    assert mine.score == pytest.approx(scores[0].mean()) and mine.score_change == score_interval(*scores)
    nll, tokens = column("m", "nll", np.sum), column("m", "tokens", np.sum)
    assert mine.ppl == pytest.approx(np.exp(nll.sum() / tokens.sum()))
    assert mine.ppl_change == paired_interval(nll, tokens, column(FULL, "nll", np.sum), np.exp)
    assert mine.kept == pytest.approx(np.mean([(10 + i) / 20 for i in range(7)]))
    few = {(line.method, line.task): line for line in lines(rows, samples[:12], cells)}
    assert few["m", ALL].samples == 12 and few["m", ALL].score_change is None  # four contexts


@pytest.mark.parametrize(
    ("name", "n"), [("code+where", 1), ("where+code+colour", 1), ("code-in-image-k+which-image", 3)]
)
def test_questions_that_follow_each_other(name, n):
    for sample in demo_samples(name, 4, 2, 3):
        scenes = sample.lines[0].images
        assert len(scenes) == n and [line.role for line in sample.lines[::2]] == ["user"] * len(name.split("+"))
        assert all(line.role == "assistant" and line.text for line in sample.lines[1::2])
        assert len({line.text for line in sample.lines[::2]}) == len(sample.lines[::2])
        if name == "code+where":
            rng = np.random.default_rng(0)
            assert sample.lines[0].text == ask_code(rng, scenes, 0).text
            assert sample.lines[1].text == scenes[0].code
            answers = {(q.text, q.answer) for q in (ask_where(rng, scenes, 0) for _ in range(40)) if q}
            assert (sample.lines[2].text, sample.answer) in answers
    first, again = demo_samples(name, 2, 2, 3), demo_samples(name, 3, 2, 3)
    assert [one.digest() for one in first] == [one.digest() for one in again[:2]]


def test_chains_that_cannot_be():
    for name in ("code+which-image", "code+difference", "code+where/2"):
        with pytest.raises((UsageError, UnknownNameError)):
            demo_samples(name, 1, 0, 4)
    with pytest.raises(UsageError, match="2 to 8 images"):
        demo_samples("which-image+code-in-image-k", 1, 0, 1)


def test_a_second_question_is_read_after_the_first_was_compressed(native):
    [sample] = demo_samples("code+where", 1, 3, 4)
    rows = run([sample], [Cell("knorm", pykvedge.plan("knorm", 0.5))])
    full, cut = rows[sample.id, FULL, "1.0"], rows[sample.id, "knorm", "0.5"]
    assert full["kept"] == full["prompt_tokens"] == cut["prompt_tokens"]
    assert cut["kept"] == pytest.approx(0.5 * cut["prompt_tokens"], abs=6) and cut["kld"] > 1e-6
