"""kvedge eval --compress context: the question is read after the compression, which does not know the question."""

from dataclasses import replace
from itertools import product

import pytest
from choosing import whole
from eval_runs import MMPROJ, MODEL, run

import pykvedge
from kvedge_lab.eval.measure import WAYS, Cell, MeasureOptions
from kvedge_lab.eval.reader import Reader
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import FULL, Job, evaluate, full_cell
from kvedge_lab.eval.tasks import DialogMessage, Sample, demo_samples
from pykvedge.models.vision import ImagePiece
from pykvedge.plans.presets import DEFAULT_METHOD


def cells(*budgets, names=("snapkv", "knorm", "h2o")):
    return [Cell(name, pykvedge.plan(name, budget)) for name in names for budget in budgets]


def asked(sample, question):
    return replace(sample, id=f"{sample.id} {question}", lines=(replace(sample.lines[0], text=question),))


def test_the_whole_cache_does_not_mind_when_the_question_comes(native):
    samples = [*demo_samples("code", 2, 5, 4), *demo_samples("code/2", 1, 5, 4)]
    after, with_it = run(samples, [], compress="context"), run(samples, [])
    for key, row in with_it.items():
        assert after[key]["answer"] == row["answer"]
        assert after[key]["nll"] == pytest.approx(row["nll"], abs=2e-2)


def test_what_is_kept_does_not_depend_on_the_question(native):
    [sample] = demo_samples("code", 1, 3, 4)
    two = [asked(sample, text) for text in ("What is the code?", "Is there a red circle? What else can you see there?")]
    rows = run(two, cells(0.2), compress="context")
    for name in ("snapkv", "knorm", "h2o"):
        first, second = (rows[one.id, name, "0.2"] for one in two)
        same = ("kept", "kept_bytes", "full_bytes", "prompt_tokens", "image_tokens")
        assert [first[k] for k in same] == [second[k] for k in same]
        assert first["kept"] == pytest.approx(0.2 * first["prompt_tokens"], abs=2)
    aware = run(two, cells(0.2))
    assert len({aware[one.id, "snapkv", "0.2"]["prompt_tokens"] for one in two}) == 2  # these prompts have the question


def test_the_first_token_of_the_answer_is_compressed_too(native):
    """With compress = prompt, an answer of one token has the full cache's logits; with context it does not."""
    [sample] = demo_samples("code", 1, 3, 4)
    words = [replace(sample, id=word, answer=word) for word in ("red", "two", "the", "circle", "4", "top")]
    counted = run(words, [], answers=False)
    short = next(one for one in words if counted[one.id, FULL, "1.0"]["tokens"] == 1)
    aware, before = (run([short], cells(0.02), compress=how) for how in ("prompt", "context"))
    found = []
    for name in ("snapkv", "knorm", "h2o"):
        assert aware[short.id, name, "0.02"]["tokens"] == 1
        assert aware[short.id, name, "0.02"]["kld"] == pytest.approx(0, abs=1e-12)
        found.append(before[short.id, name, "0.02"]["kld"])
    assert min(found) > 1e-9


def test_decode_policies_go_on_behind_the_question(native):
    [sample] = demo_samples("where", 1, 3, 4)
    plans = [pykvedge.plan("h2o", 0.2, decode="heavy-hitter"), pykvedge.plan("lookm", 0.2, decode="sliding")]
    rows = run([sample], [Cell(f"own {i}", plan) for i, plan in enumerate(plans)], compress="context")
    assert all(row["answer"] is not None for row in rows.values()) and len(rows) == 3


def test_text_with_nothing_before_its_question_is_left_out(native):
    sample = Sample("plain", "text", (DialogMessage("user", "What is there?"),), "Nothing.")
    records = Records(None, {}, False)
    out = evaluate(Job(MODEL, MMPROJ, [sample], [full_cell()], MeasureOptions(compress="context")), records)
    assert len(out.left_out) == 1 and "has no text or image before its question" in out.left_out[0] and not records.rows


def test_results_of_the_two_do_not_mix(kvedge, tmp_path):
    file = tmp_path / "r.jsonl"
    small = ["eval", "--tasks", "code", "--samples", 1, "--method", "knorm", "--metrics", "kld", "--save", file]
    assert kvedge(*small).code == 0
    kvedge(*small, "--resume", "--compress", "context").failed(2, "compress 'prompt', not 'context'")
    assert kvedge(*small, "--resume").code == 0
    other = [*small[:-1], tmp_path / "c.jsonl", "--compress", "context"]
    assert kvedge(*other).code == 0
    again = [*small[:-1], tmp_path / "c.jsonl", "--resume"]
    kvedge(*again, "--compress", "prompt").failed(2, "compress 'context', not 'prompt'")
    assert kvedge(*again).code == 0  # omitted options come from the file
    assert FULL in kvedge(*other, "--resume").out
    older = (tmp_path / "c.jsonl").read_text().replace(', "as_one": true', "", 1)
    (tmp_path / "c.jsonl").write_text(older)  # an older file, of the time when contexts were compressed by message
    kvedge(*other, "--resume").failed(2, "with as_one None, not True")


def test_a_second_pass_finds_the_room_that_other_plans_gave_back(native):
    """The second pass has enough memory, however many plans were tried on earlier copies of the prompt."""
    cells = [Cell(f"kvzip{n}", pykvedge.plan("kvzip", 0.5, text_prior=bool(n % 2))) for n in range(24)]
    [sample] = demo_samples("describe", 1, 3, 4)
    rows = run([sample], cells, answers=False, compress="context")
    assert len({rows[sample.id, cell.name, "0.5"]["kld"] for cell in cells}) <= 2


@pytest.mark.parametrize("how", WAYS)
def test_the_default_method_keeps_what_the_question_is_and_what_it_asks_for(native, how):
    """Second and third questions: at 0.5 and 0.2, all answers equal those of the full cache."""
    samples = [s for task in ("code+describe", "colour+where+describe") for s in demo_samples(task, 4, 5, 4)]
    budgets = (0.5, 0.2)
    rows = run(samples, [Cell(DEFAULT_METHOD, pykvedge.default_plan(b)) for b in budgets], compress=how)
    answers = {key: row["answer"] for key, row in rows.items()}
    for one, budget in product(samples, map(str, budgets)):
        assert answers[one.id, DEFAULT_METHOD, budget] == answers[one.id, FULL, "1.0"] == one.answer


def test_a_conversation_is_one_prompt(native):
    """A conversation is one prompt: the budget is a share of all tokens. The full cache answers alike in every way."""
    [sample] = demo_samples("colour+where+describe", 1, 5, 4)
    rows = {how: run([sample], cells(0.2, names=("knorm",)), compress=how) for how in WAYS}
    whole = rows["conversation"][sample.id, "knorm", "0.2"]
    before = rows["context"][sample.id, "knorm", "0.2"]
    assert whole["kept"] == int(0.2 * whole["prompt_tokens"]) and before["kept"] == int(0.2 * before["prompt_tokens"])
    by_message = rows["prompt"][sample.id, "knorm", "0.2"]
    assert before["prompt_tokens"] < whole["prompt_tokens"] == by_message["prompt_tokens"]
    full = [of[sample.id, FULL, "1.0"] for of in rows.values()]
    assert len({row["answer"] for row in full}) == 1
    assert [row["nll"] for row in full] == pytest.approx([full[0]["nll"]] * 3, abs=2e-2)


# two that gather the same, and others
GATHERING = ("knorm", "vnorm", "snapkv", "adakv", "h2o", "meda", DEFAULT_METHOD)
READ = [("context", GATHERING), ("prompt", ("vnorm", "snapkv")), ("conversation", ("vnorm", "snapkv"))]


@pytest.mark.parametrize(("how", "names"), [*READ, *whole(("prompt", GATHERING), ("conversation", GATHERING))])
def test_what_is_read_once_for_all_equals_a_reading_for_each(native, how, names):
    """Questions with one context, and methods that gather the same: records equal those of separate readings."""
    [sample] = demo_samples("code", 1, 3, 4)
    two = [replace(asked(sample, text), context="scene") for text in ("What is the code?", "Is there a red circle?")]
    made = [*cells(0.1, names=names), *cells(0.1, 0.3, names=("kvzip",))]
    together = run(two, made, answers=False, compress=how)
    apart = [replace(one, context="") for one in two]
    for cell in made:
        alone = run(apart, [cell], answers=False, compress=how)
        for key in ((one.id, *cell.key) for one in two):
            assert {**alone[key], "seconds": 0} == {**together[key], "seconds": 0}


def test_questions_of_one_context_are_read_behind_one_prompt(native, monkeypatch):
    [sample] = demo_samples("code", 1, 3, 4)
    three = [replace(asked(sample, f"What is the {what}?"), context="scene") for what in ("code", "colour", "shape")]
    read = []
    plain = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, pieces: (read.append(pieces), plain(self, pieces)))
    run(three, cells(0.2, 0.5), answers=False, compress="conversation")
    images = [any(isinstance(piece, ImagePiece) for piece in pieces) for pieces in read]
    assert images.count(True) == 4 and images.count(False) == 12  # full, snapkv, knorm, h2o: images and questions
