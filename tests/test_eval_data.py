"""Samples of kvedge eval: from the demo generator, and from files in the forms of data sets."""

import json

import pytest
from PIL import Image

from kvedge_lab.demo_tasks.prompts import MEDIA
from kvedge_lab.eval.datasets import DatasetError, load
from kvedge_lab.eval.milebench import COLUMNS
from kvedge_lab.eval.tasks import demo_names, demo_samples
from pykvedge.errors import UnknownNameError, UsageError

MARK = "<M>"


@pytest.fixture
def folder(tmp_path):
    """A folder with images/0.png to images/6.png, all of different widths."""
    (tmp_path / "images").mkdir()
    for i in range(7):
        Image.new("RGB", (20 + i, 16)).save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def write_lines(path, *objects):
    return write(path, "".join(json.dumps(o) + "\n" for o in objects))


def rendered(sample):
    """Returns (role, text with a mark for each image, widths of its images) of each message."""
    return [(m.role, m.content(MARK), [p.width for p in m.pictures]) for m in sample.messages()]


# ------------------------------------------------------------------------------------------------- demo tasks


@pytest.mark.parametrize("name", demo_names())
def test_demo_samples_are_the_conversations_that_the_model_was_trained_on(name):
    from itertools import islice

    from kvedge_lab.demo_tasks.evalset import samples

    task, _, second = name.partition("/")
    for ours, theirs in zip(demo_samples(name, 3, 5, 4), islice(samples(task, 5, 4, bool(second)), 3), strict=True):
        expected = [(m["role"], m["content"].replace(MEDIA, MARK)) for m in theirs.messages()]
        assert [(role, text) for role, text, _ in rendered(ours)] == expected
        assert ours.answer == theirs.answer and ours.score(f" {theirs.answer} ") == 1
        pixels = [p.rgb for m in ours.messages() for p in m.pictures]
        assert pixels == [image.tobytes() for image in theirs.images()]


def test_demo_samples_have_names_that_last():
    few, many = demo_samples("code", 2, 0, 4), demo_samples("code", 5, 0, 4)
    assert [(s.id, s.digest()) for s in few] == [(s.id, s.digest()) for s in many[:2]]
    everything = [s for name in demo_names() for seed in (0, 1) for s in demo_samples(name, 3, seed, 4)]
    assert len({s.id for s in everything}) == len(everything)


def test_demo_tasks_that_do_not_exist():
    with pytest.raises(UnknownNameError, match="did you mean 'colour'"):
        demo_samples("color", 1, 0, 4)
    with pytest.raises(UsageError, match="2 to 8 images"):
        demo_samples("which-image", 1, 0, 1)


# ------------------------------------------------------------------------------------------------------ JSONL


def test_jsonl(folder):
    path = write_lines(
        folder / "own.jsonl",
        {"question": "What?", "answer": "This.", "images": ["images/0.png"]},
        {"id": "b", "task": "two", "question": "<image> or <image>?", "answer": "B", "choices": ["x", "y"],
         "images": ["images/1.png", "images/2.png"], "max_tokens": 9},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."},
                      {"role": "assistant", "content": "ok"}, {"role": "user", "content": "What is it?"}],
         "answer": "it", "images": ["images/3.png", "images/4.png"], "metric": "exact"},
        {"messages": [{"role": "user", "content": "Here <image>"}, {"role": "assistant", "content": "ok"},
                      {"role": "user", "content": "And <image>?"}],
         "answer": "it", "images": ["images/5.png", "images/6.png"], "metric": "kld"},
    )  # fmt: skip
    a, b, c, d = load(path)
    assert (a.id, a.task, a.metric, a.max_tokens) == ("own:1", "own", "rouge", None)
    assert rendered(a) == [("user", f"{MARK}\nWhat?", [20])]
    assert (b.id, b.task, b.metric, b.max_tokens) == ("own:b", "two", "choice", 9)
    listed = "\nChoice list: \nA. x\nB. y\nYour answer is: "
    assert rendered(b) == [("user", f"{MARK} or {MARK}?{listed}", [21, 22])]
    assert b.score("y") == 1 and b.score("x") == 0
    numbered = f"Image 1: {MARK}\nImage 2: {MARK}\nLook."
    turns = [("system", "Be brief.", []), ("user", numbered, [23, 24]), ("assistant", "ok", [])]
    assert rendered(c) == [*turns, ("user", "What is it?", [])]
    assert rendered(d) == [("user", f"Here {MARK}", [25]), ("assistant", "ok", []), ("user", f"And {MARK}?", [26])]
    assert d.score("it") is None
    assert [s.id for s in load(path, limit=2)] == ["own:1", "own:b"]


def test_a_text_may_hold_other_ends_of_lines(tmp_path):
    said = {"question": "one\u2028two\x85three", "answer": "yes"}
    (tmp_path / "own.jsonl").write_text(json.dumps(said, ensure_ascii=False) + "\r\n", encoding="utf-8")
    [sample] = load(tmp_path / "own.jsonl")
    assert sample.lines[0].text == said["question"]


GOOD = {"question": "What?", "answer": "This.", "images": ["images/0.png"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"anwser": "x"}, "unknown column 'anwser'; did you mean 'answer'"),
        ({"answer": ""}, "'answer' must be a text"),
        ({"images": ["images/none.png"]}, "none.png does not exist"),
        ({"images": "images/0.png"}, "'images' must be a list"),
        ({"question": "<image><image>?"}, "has 2 places <image> for 1 images"),
        ({"metric": "bleu"}, "unknown metric 'bleu'"),
        ({"metric": "choice"}, "'choices' and the metric 'choice' need each other"),
        ({"choices": [1]}, "'choices' must be a list of texts"),
        ({"choices": ["That.", "Those."]}, "the answer 'This.' is neither a choice nor"),
        ({"choices": ["This.", "This. "]}, "two of the 'choices' are equal"),
        ({"max_tokens": 0}, "'max_tokens' must be"),
        ({"messages": []}, "exactly one of"),
        ({"question": 5}, "'question' must be a text, not 5"),
        ({"images": ["x" * 5000]}, "does not exist"),
        ({"images": ["0.png\0"]}, "does not exist"),
        ({"question": "\ud83d?"}, "a lone surrogate"),
    ],
)
def test_a_bad_line_is_named(folder, change, words):
    path = write_lines(folder / "own.jsonl", *[GOOD] * 16, {**GOOD, **change})
    with pytest.raises(DatasetError, match=r"own\.jsonl line 17") as error:
        load(path)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no samples"),
        ("\n\n", "has no samples"),
        ('{"question": ', "line 1 is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("[" * 100000, "line 1 is not JSON: its values are nested too deep"),
        ('{"question": "A?", "question": "B?", "answer": "x"}', "the name 'question' occurs twice in an object"),
        ('{"question": "A?", "answer": "x", "images": ["."]}', "the image .* is a folder"),
        (json.dumps({"id": 1, **GOOD}) + "\n" + json.dumps({"id": 1, **GOOD}), "line 2: the id 'own:1' occurs twice"),
        (json.dumps({"messages": [{"role": "assistant", "content": "x"}], "answer": "y"}), "must alternate"),
        (json.dumps({"messages": [{"role": "robot", "content": "x"}], "answer": "y"}), "unknown role"),
        (json.dumps({"answer": "y"}), "exactly one of 'messages' and 'question'"),
    ],
)
def test_files_that_are_no_data_sets(folder, text, words):
    with pytest.raises(DatasetError, match=words):
        load(write(folder / "own.jsonl", text))


def test_paths_and_formats_that_do_not_exist(folder):
    with pytest.raises(DatasetError, match="does not exist"):
        load(folder / "none.jsonl")
    with pytest.raises(UnknownNameError, match="did you mean 'milebench'"):
        load(folder, "milbench")
    with pytest.raises(DatasetError, match="has no data set"):
        load(folder)


def test_whole_characters_may_be_escaped(folder):
    path = write(folder / "own.jsonl", '{"question": "\\ud83d\\ude00 \\\\ud83d?", "answer": "x"}')
    assert load(path)[0].lines[0].text == "\U0001f600 \\ud83d?"


# -------------------------------------------------------------------------------------------------- MileBench


def milebench(folder, name, question_type, *samples, instructions=("Answer.", "Choose.")):
    data = {
        "meta_data": {"task_instruction": instructions, "question_type": question_type},
        "data": [
            {"sample_id": i, "task_instruction_id": 1, "image_quantity_level": "Few", "response": response,
             "task_instance": {"context": context, "images_path": images, **({"choice_list": c} if c else {})}}
            for i, (context, images, c, response) in enumerate(samples)
        ],
    }  # fmt: skip
    (folder / name / "images").mkdir(parents=True)
    for i in range(7):
        (folder / name / "images" / f"{i}.png").write_bytes((folder / "images" / f"{i}.png").read_bytes())
    return write(folder / name / f"{name}.json", data)


def test_milebench(folder):
    images = [f"{i}.png" for i in range(7)]
    milebench(folder, "TQA", "multi-choice", ("See {image#2} and {table#1}?", images[:2], ["cat", "dog"], "dog"))
    milebench(folder, "ALFRED", "open-ended", ("What is done?", images, None, "She walks."),
              instructions={"0": "no", "1": "Say."})  # fmt: skip
    milebench(folder, "TextNeedleInAHaystack", "open-ended", ("Find {image#1}", images[:1], None, "77"))
    alfred, tqa, needle = load(folder)
    choices = "\nChoice list: \nA. cat\nB. dog\nYour answer is: "
    assert rendered(tqa) == [("user", f"Choose.\nSee {MARK} and {MARK}?{choices}", [21, 20])]
    assert (tqa.task, tqa.metric, tqa.groups, tqa.id) == ("TQA", "choice", ("S-1", "few images"), "TQA:0")
    assert tqa.score("The answer is B") == 1 and tqa.max_tokens == 512
    [(_, text, widths)] = rendered(alfred)
    assert text.startswith(f"Image 1: {MARK}\n") and text.endswith("Say.\nWhat is done?") and len(widths) == 7
    assert alfred.metric == "rouge" and alfred.groups == ("S-4", "medium images")
    assert needle.metric == "contains" and needle.groups[0] == "NH"
    assert load(folder / "TQA") == load(folder / "TQA" / "TQA.json") == [tqa]
    assert sum(map(len, COLUMNS.values())) == 29


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (("{image#3}", ["0.png"], None, "x"), "the text names image 3, but the sample has 1"),
        (("x", ["none.png"], None, "x"), "none.png does not exist"),
        ((5, ["0.png"], None, "x"), "does not have the format of MileBench"),
    ],
)
def test_bad_milebench_samples_are_named(folder, sample, words):
    path = milebench(folder, "TQA", "open-ended", ("x", ["0.png"], None, "x"), sample)
    with pytest.raises(DatasetError, match=r"TQA\.json sample 1") as error:
        load(path)
    assert words in str(error.value)


def test_choices_are_scored_where_they_are_asked_for(folder):
    one = "Which?", ["0.png"]
    [listed] = load(milebench(folder, "GPR1200", "open-ended", (*one, ["cat", "dog"], "a dog")))
    [unlisted] = load(milebench(folder, "TQA", "multi-choice", (*one, None, "a dog")))
    assert listed.metric == unlisted.metric == "rouge"


def test_more_choices_than_letters(folder):
    many = [f"image {i}" for i in range(30)]
    [sample] = load(milebench(folder, "GPR1200", "multi-choice", ("Which?", ["0.png"], many, "image 7")))
    assert "\nimage 0\nimage 1\n" in rendered(sample)[0][1] and sample.score("It is image 7.") == 1


# ------------------------------------------------------------------------------- LLaVA-Description and MM-Vet


def test_llava_description(folder):
    turns = [{"from": "human", "value": "<image>\nDescribe it."}, {"from": "gpt", "value": "A thing."}]
    more = [*turns, {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    path = write(
        folder / "description.json",
        [
            {"image": "images/0.png", "question": "Describe this.", "answer": "A star."},
            {"image": "images/1.png", "question": "Describe\n<image>", "answer": "A star."},
            {"id": "x", "image": "images/2.png", "conversations": turns},
            {"id": "x", "image": "images/3.png", "conversations": more},
        ],
    )
    a, b, c, d = load(path)
    assert rendered(a) == [("user", f"{MARK}\nDescribe this.", [20])]
    assert rendered(b) == [("user", f"Describe\n{MARK}", [21])]
    assert rendered(c) == [("user", f"{MARK}\nDescribe it.", [22])] and c.answer == "A thing."
    assert [text for _, text, _ in rendered(d)] == [f"{MARK}\nDescribe it.", "A thing.", "Why?"] and d.answer == "So."
    assert {s.metric for s in (a, b, c, d)} == {"rouge"} and len({s.id for s in (a, b, c, d)}) == 4


def test_mm_vet(folder):
    original = {"imagename": "0.png", "question": "What is x?", "answer": "-1<AND>-5", "capability": ["ocr", "math"]}
    [a] = load(write(folder / "mm-vet.json", {"v1_0": original}))
    assert rendered(a) == [("user", f"{MARK}\nWhat is x?", [20])]
    assert a.groups == ("ocr", "math") and a.id == "mm-vet:v1_0"
    item = {"image": "images/1.png", "question": "What is x?", "answer": "5"}
    [b] = load(write(folder / "list.json", [item]), "mm-vet")
    assert rendered(b) == [("user", f"What is x?\n{MARK}", [21])]
    [c] = load(write(folder / "sub" / "l.json", [item]), images=folder)
    assert rendered(c) == [("user", f"{MARK}\nWhat is x?", [21])]


@pytest.mark.parametrize("key", ["first", float("inf"), float("nan"), -9, [], None])
def test_instructions_that_are_not_there(folder, key):
    path = milebench(folder, "TQA", "open-ended", ("x", ["0.png"], None, "x"))
    data = json.loads(path.read_text())
    data["data"][0]["task_instruction_id"] = key
    with pytest.raises(DatasetError, match="does not have the format of MileBench"):
        load(write(path, data))


ROBOT = {"image": "images/0.png", "conversations": [{"from": "robot", "value": "x"}] * 3}


@pytest.mark.parametrize("data", [[1], {"a": 1}, [{"image": "images/0.png", "question": "x"}], 5, [], [ROBOT]])
def test_json_of_another_form(folder, data):
    with pytest.raises(DatasetError):
        load(write(folder / "d.json", data))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", [{"img": "images/0.png", "question": "x", "answer": "y"}], "a.json sample 1: unknown column 'img'"),
        ("a.json", {"v1_0": {"image_name": "0.png", "question": "x", "answer": "y"}}, "unknown column 'image_name'"),
        ("a.json", {"v1_0": {"imagename": "0.png", "qestion": "x", "answer": "y"}}, "did you mean 'question'"),
        ("a.json", {"v1_0": {"imagename": "0.png", "question": "x", "answer": "y", "capability": 5}}, "'capability'"),
        ("a.json", "[" * 100000, "a.json is not JSON"),
        ("a.json", {"v1_0": {"imagename": "x" * 5000, "question": "x", "answer": "y"}}, "does not exist"),
        ("a.json", [{"image": "images/0.png", "question": "x", "answer": "\udc00"}], "a lone surrogate"),
    ],
)
def test_what_is_wrong_with_json_is_named(folder, name, data, words):
    """Without the error, a misspelt image key would give a question without an image."""
    with pytest.raises(DatasetError) as error:
        load(write(folder / name, data))
    assert words in str(error.value) and "\n" not in str(error.value)
