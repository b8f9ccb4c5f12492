"""kvedge eval: its figures equal a session's, its results survive, and wrong input is refused."""

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from choosing import distinct
from conftest import THREADS
from eval_runs import MMPROJ, MODEL, run
from forking import Warm
from limits import of_child
from PIL import Image
from profilefiles import write_profile
from waits import until

import pykvedge
from kvedge_lab import drawing
from kvedge_lab.eval import plot, table
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import FULL, full_cell
from kvedge_lab.eval.tasks import DialogMessage, Sample, demo_samples
from kvedge_lab.tune.race import RaceRecords
from pykvedge import Picture, Sampling, UsageError


def without_time(rows):
    return {(r["id"], r["method"], r["budget"]): {k: v for k, v in r.items() if k != "seconds"} for r in rows}


def pictures(sample):
    return [Picture(p.name, p.width, p.height, p.rgb) for m in sample.messages() for p in m.pictures]


def test_greedy_answers_are_those_of_a_session(native):
    """All kinds of methods, several budgets from one reading: copies of a sequence answer as separate sessions do."""
    [sample] = demo_samples("code", 1, 3, 4)
    cells = [Cell(name, pykvedge.plan(name, b)) for name in distinct() if name != FULL for b in (0.4, 0.1)]
    rows = run([sample], cells)
    with pykvedge.Session(MODEL, MMPROJ, threads=THREADS) as session:
        for cell in (full_cell(), *cells):
            session.clear()
            session.set_plan(cell.plan)
            answer = session.ask(sample.lines[0].text, pictures(sample), Sampling(max_tokens=sample.max_tokens))
            text = answer.read().strip()
            row = rows[sample.id, cell.name, str(cell.budget)]
            assert (row["answer"], row["score"]) == (text, float(text == sample.answer)), cell
            kv = answer.report.kv
            assert (row["full_bytes"], row["kept_bytes"]) == (kv.full_bytes, kv.kept_bytes), cell
            assert row["prompt_tokens"] == answer.report.tokens.prompt


def test_second_turns_are_compressed_turn_by_turn(native):
    [sample] = demo_samples("code/2", 1, 3, 4)
    plan = pykvedge.plan("mixkv", 0.3)
    rows = run([sample], [Cell("mixkv", plan)])
    with pykvedge.Session(MODEL, MMPROJ, plan, threads=THREADS) as session:
        first = session.ask(sample.lines[0].text, pictures(sample))
        assert first.read().strip() == sample.lines[1].text  # otherwise the two conversations would differ
        second = session.ask(sample.lines[2].text)
        text = second.read().strip()
        row = rows[sample.id, "mixkv", "0.3"]
        assert row["answer"] == text
        assert row["kept"] == first.report.kv.kept_of_them + second.report.kv.kept_of_them
    assert rows[sample.id, FULL, "1.0"]["score"] == 1


def test_likelihood_alone_and_answers_alone_are_the_same_figures(native):
    samples, cells = demo_samples("where", 2, 0, 4), [Cell("lookm", pykvedge.plan("lookm", 0.1))]
    both, answers, likelihood = (
        run(samples, cells, **kind) for kind in ({}, {"likelihood": False}, {"answers": False})
    )
    for key, row in both.items():
        assert row["answer"] == answers[key]["answer"] and "nll" not in answers[key]
        assert [row[k] for k in ("nll", "kld", "top1")] == [likelihood[key][k] for k in ("nll", "kld", "top1")]
        assert "answer" not in likelihood[key]


def test_the_full_cache_agrees_with_itself_and_less_differs_more(native):
    samples = demo_samples("code", 3, 0, 4)
    cells = [Cell("all", pykvedge.plan("h2o", 1.0)), *(Cell("h2o", pykvedge.plan("h2o", b)) for b in (0.5, 0.05))]
    rows = run(samples, cells)
    for s in samples:
        assert rows[s.id, FULL, "1.0"]["kld"] == 0
        assert rows[s.id, "all", "1.0"]["kld"] < 1e-6
        assert rows[s.id, "all", "1.0"]["answer"] == rows[s.id, FULL, "1.0"]["answer"]
    lines = {(x.method, x.budget): x for x in table.lines(rows, samples, cells) if x.task == table.ALL}
    assert lines["h2o", 0.05].kld > lines["h2o", 0.5].kld > lines["all", 1.0].kld >= 0
    assert lines["h2o", 0.05].kept == pytest.approx(0.05, abs=0.01)


# ------------------------------------------------------------------------------------------- the file of results


def command(save, *more, tasks="colour,where", samples=4):
    return ["eval", "--tasks", tasks, "--samples", samples, "--method", "lookm,snapkv", "--budget", "0.5,0.1",
            "--threads", THREADS, "--save", save, *more]  # fmt: skip


def records_of(path):
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    return header, rows


@pytest.fixture
def start(environment):
    """start(*arguments) -> the running program."""
    started = []

    def go(*arguments):
        program = [sys.executable, "-m", "pykvedge", *map(str, arguments)]
        process = Warm(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return process

    yield go
    for process in started:
        process.kill()
        process.communicate()


def wait_for_lines(path, n, process):
    until(lambda: process.poll() is not None or (path.exists() and path.read_bytes().count(b"\n") >= n))
    assert process.poll() is None, process.communicate()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_after_a_kill_nothing_is_measured_twice(kvedge, start, native, tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert kvedge(*command(whole)).code == 0
    process = start(*command(broken, samples=100))
    wait_for_lines(broken, 9, process)
    process.kill()
    process.wait()
    before = broken.read_bytes().rpartition(b"\n")[0] + b"\n"
    broken.write_bytes(before + b'{"id": "colour:0:4:3", "met')  # an unfinished line
    done = kvedge(*command(broken, "--resume", "--json"))
    assert done.code == 0, done
    assert broken.read_bytes().startswith(before)
    (_, expected), (_, found) = records_of(whole), records_of(broken)
    wanted = without_time(expected)
    assert len(found) == len(without_time(found)), "measured twice"
    assert {k: v for k, v in without_time(found).items() if k in wanted} == wanted
    again = kvedge(*command(broken, "--resume", "--json"))
    assert again.json["rows"] == done.json["rows"] and len(records_of(broken)[1]) == len(found)
    more = kvedge(*command(broken, "--resume", "--json", samples=5))
    assert more.code == 0 and len(records_of(broken)[1]) >= len(found)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_keeps_what_was_measured(start, native, tmp_path):
    save = tmp_path / "r.jsonl"
    process = start(*command(save, samples=2000))
    wait_for_lines(save, 12, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    assert "| full " in out and "Stopped before the end." in out
    assert len(records_of(save)[1]) >= 11


@pytest.mark.skipif(os.name != "posix", reason="resource limits")
def test_a_full_disk_is_one_line_and_keeps_what_was_measured(started, native, tmp_path):
    save, limit = tmp_path / "r.jsonl", 6000
    done = started(*command(save, "--quiet"), preexec_fn=of_child(limit))
    assert done.code == 1
    assert len(done.err.splitlines()) == 1 and "r.jsonl cannot be written" in done.err
    assert "| full " in done.out
    assert save.read_bytes().endswith(b"\n") and 4000 < save.stat().st_size <= limit
    assert len(records_of(save)[1]) > 3


def test_files_that_do_not_belong_to_the_run(kvedge, native, tmp_path):
    save = tmp_path / "r.jsonl"
    few = ["eval", "--tasks", "code", "--samples", 1, "--method", "h2o", "--threads", THREADS, "--quiet", "--save"]
    assert kvedge(*few, save).code == 0
    kvedge(*few, save).failed(2, "exists; add --resume")
    kvedge(*few, save, "--resume", "--kv-type", "bf16").failed(2, "was measured with kv_type 'f16', not 'bf16'")
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "x"}\n')
    kvedge(*few, other, "--resume").failed(2, "does not contain results of kvedge eval")
    assert other.read_text() == '{"question": "x"}\n'
    kvedge(*few, tmp_path / "no" / "r.jsonl").failed(1, "cannot be written")
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "What is it?", "answer": "red"}) + "\n")
    own = ["eval", data, "--method", "h2o", "--threads", THREADS, "--quiet", "--save", tmp_path / "own.jsonl"]
    assert kvedge(*own).code == 0
    data.write_text(json.dumps({"question": "What is it?", "answer": "blue"}) + "\n")
    kvedge(*own, "--resume").failed(2, "d:1 differs from the sample")


def test_a_picture_or_a_profile_that_changed_is_refused(kvedge, native, tmp_path):
    data, picture = tmp_path / "d.jsonl", tmp_path / "a.bmp"  # pictures of one size have files of one size
    data.write_text(json.dumps({"question": "What is it?", "answer": "red", "images": [picture.name]}) + "\n")
    config = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    again = ["eval", data, "--method", "prefixkv", "--plan", tmp_path / "own.json", "--threads", THREADS, "--quiet",
             "--metrics", "kld", "--save", tmp_path / "r.jsonl", "--resume"]  # fmt: skip
    own = pykvedge.plan("prefixkv", 0.2, **{"allocator.source": "profile"})
    (tmp_path / "own.json").write_text(own.to_json())
    profiles = tmp_path / "config" / "kvedge" / "profiles"
    profiles.mkdir(parents=True)
    made = write_profile(MODEL, "prefix", profiles)
    Image.new("RGB", (240, 240), "red").save(picture)
    assert kvedge(*again, env=config).code == kvedge(*again, env=config).code == 0
    other = json.loads(made.read_text())
    other["values"][0][0] /= 2
    made.write_text(json.dumps(other))
    kvedge(*again, env=config).failed(2, "the plan or profile of own at 0.2 differs from the file")
    write_profile(MODEL, "prefix", profiles)
    Image.new("RGB", (240, 240), "blue").save(picture)
    kvedge(*again, env=config).failed(2, "d:1 differs from the sample")


def test_resume_alone_goes_on_with_what_was_asked(kvedge, native, tmp_path):
    save = tmp_path / "r.jsonl"
    few = ["--tasks", "code", "--samples", 1, "--method", "h2o", "--budget", "0.3", "--metrics", "score"]
    again = ["eval", "--threads", THREADS, "--json", "--save", save]
    first = kvedge(*again, *few)
    before = save.read_bytes()
    assert kvedge(*again, "--resume").json["rows"] == first.json["rows"] and save.read_bytes() == before
    more = kvedge(*again, "--resume", "--samples", 2)
    assert {(r["method"], r["budget"], r["samples"]) for r in more.json["rows"]} == {("full", 1.0, 2), ("h2o", 0.3, 2)}
    other = kvedge(*again, "--resume", "--method", "snapkv")
    assert {(r["method"], r["budget"], r["task"]) for r in other.json["rows"]} == {
        (name, budget, task) for name, budget in (("full", 1.0), ("snapkv", 0.3)) for task in ("code", "all")
    }


def test_a_table_fits_a_terminal_and_says_how_small_a_divergence_is():
    lines = [
        table.ResultRow("mixkv-sparsemm", 0.05, "all", 240, 240, 0.05, 0.95, (-0.1, 0.05), 0.5, 0.91, 1.1, (0.1, 0.25),
                        9e-7, (4e-7, 2e-6), 1e-9, kld_p99=0.25, top1=1.0),
    ]  # fmt: skip
    said = table.as_markdown(lines)
    tables = [block.splitlines() for block in said.split("\n\n") if block.startswith("|")]
    assert len(tables) > 1 and max(map(len, said.splitlines())) <= 80
    heads = [[cell.strip() for cell in rows[0].strip("|").split("|")] for rows in tables]
    assert all(head[:2] == ["method", "budget"] for head in heads)
    rest = [name for head in heads for name in head[2:]]
    assert len(set(rest)) == len(rest) and {"score change", "PPL change", "KL interval"} <= set(rest)
    assert "| 9e-07 " in said and "| 4e-07 to 2e-06 " in said and "| 1e-09 " in said


def test_a_header_of_another_model_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    Records(path, {"model": "a"}, False).close()
    with pytest.raises(UsageError, match="was measured with model 'a', not 'b'"):
        Records(path, {"model": "b"}, True)
    Records(path, {"model": "a"}, True).close()


@pytest.mark.parametrize("kind", [Records, RaceRecords])
def test_records_that_are_no_figures_are_refused(tmp_path, kind):
    """A file that was edited or damaged is refused when it is opened, not after the measurement."""
    path, more = tmp_path / "r.jsonl", {} if kind is RaceRecords else {"resume": True}
    figures = {"prompt_tokens": 9, "kept": 4.5, "full_bytes": 90, "kept_bytes": 45, "tokens": 3, "top1": 3, "kld": 0.5}
    good = {"id": "a", "digest": "d", "plan": "p", "method": "full", "budget": 1.0, "answer": "x", "at": 2, **figures}
    first = json.dumps({kind.KIND: kind.VERSION})
    for name, value in [(None, None), *((name, value) for name in kind.NEEDED for value in (None, "1", [1]))]:
        path.write_text(f"{first}\n{json.dumps(good | {name: value} if name else good)}\n")
        if name is None:
            with closing(kind(path, {}, **more)) as read:
                assert list(read.rows) == [("a", "full", "1.0")]
            continue
        with pytest.raises(UsageError, match="does not contain"):
            kind(path, {}, **more)
    if kind is Records:
        path.write_text(f"{first}\n{json.dumps(good | {'score': 'x'})}\n")
        with pytest.raises(UsageError, match="does not contain"):
            kind(path, {}, **more)


# ---------------------------------------------------------------------------------------------- the command line


def test_tables(kvedge, native, tmp_path):
    save = tmp_path / "r.jsonl"
    arguments = command(save, "--resume", tasks="colour,code/2", samples=3)
    table = tmp_path / "table.csv"
    md, data, flat = (kvedge(*arguments, *more) for more in ([], ["--json"], ["--output", table]))
    assert md.code == data.code == flat.code == 0 and flat.out == ""
    kvedge(*arguments, "--output", tmp_path / "table.xls").failed(2, ".csv")
    rows = data.json["rows"]
    assert {(r["method"], r["budget"]) for r in rows} == {
        ("full", 1.0), ("lookm", 0.5), ("lookm", 0.1), ("snapkv", 0.5), ("snapkv", 0.1)
    }  # fmt: skip
    assert {r["task"] for r in rows} == {"colour", "code/2", "all"} and all(r["samples"] in (3, 6) for r in rows)
    listed = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [(r["method"], r["task"], float(r["ppl"])) for r in listed] == [
        (r["method"], r["task"], pytest.approx(r["ppl"])) for r in rows
    ]
    measured = without_time(records_of(save)[1])
    for r in rows:
        mine = [m for m in measured.values() if (m["method"], m["budget"]) == (r["method"], r["budget"])]
        mine = [m for m in mine if r["task"] in ("all", m["task"])]
        tokens = sum(m["tokens"] for m in mine)
        assert r["ppl"] == pytest.approx(math.exp(sum(m["nll"] for m in mine) / tokens))
        assert r["kld"] == pytest.approx(sum(m["kld"] for m in mine) / tokens)
        if r["method"] == "full":
            assert r["kld_p50"] is r["kld_max"] is None
        else:
            each = sorted(x for m in mine for x in m["klds"])
            assert sum(each) == pytest.approx(tokens * r["kld"], rel=1e-3) and len(each) == tokens
            assert r["kld_max"] == each[-1] and each[0] <= r["kld_p50"] <= r["kld_p90"] <= r["kld_p99"] <= each[-1]
            below = sum(x <= r["kld_p90"] for x in each)
            assert 0.9 * tokens - 1 <= below <= 0.9 * tokens + 1
        assert r["score"] == pytest.approx(sum(m["answer"] == m["reference"] for m in mine) / len(mine))
        if r["method"] != "full" and r["samples"] >= 5:
            low, high = r["ppl_change"]
            assert low <= high
        else:
            assert r["ppl_change"] is None
    assert md.out.count("| full ") >= 2 and max(map(len, md.out.splitlines())) <= 80 and "colour" in md.out


def test_data_sets_and_plans_from_files(kvedge, tiny, picture_file, native, tmp_path):
    llava = tiny("llava")
    data = tmp_path / "d.jsonl"
    sample = {"question": "What?", "answer": "A red thing.", "images": [str(picture_file())], "max_tokens": 5}
    data.write_text(json.dumps(sample) + "\n")
    plan = tmp_path / "mine.json"
    plan.write_text(pykvedge.plan("mixkv", 0.3, reducer="pivotal", allocator="ada").to_json())
    done = kvedge("eval", *llava.arguments(), data, "--method", "full", "--plan", plan, "--json")
    assert done.code == 0, done
    assert [(r["method"], r["budget"], r["task"]) for r in done.json["rows"]] == [
        ("full", 1.0, "d"), ("full", 1.0, "all"), ("mine", 0.3, "d"), ("mine", 0.3, "all")
    ]  # fmt: skip
    assert done.json["rows"][3]["kld"] > 0


def test_groups_average_their_tasks(native):
    samples = [
        Sample(f"{t}{i}", t, (), "", groups=("T-1", "few images")) for t, n in (("a", 1), ("b", 3)) for i in range(n)
    ]
    rows = {}
    for s in samples:
        row = {"id": s.id, "method": FULL, "budget": 1.0, "prompt_tokens": 4, "score": float(s.task == "a")}
        rows[s.id, FULL, "1.0"] = row
    found = {x.task: (x.score, x.samples) for x in table.lines(rows, samples, [full_cell()])}
    assert found == {"a": (1, 1), "b": (0, 3), "all": (0.25, 4), "T-1": (0.5, 4), "few images": (0.5, 4)}


def test_samples_and_methods_that_fail_are_left_out(kvedge, tiny, native, tmp_path):
    model = tiny("llama", n_ctx_train=400)
    data = tmp_path / "d.jsonl"
    good = {"question": "What is it?", "answer": "red", "max_tokens": 5}
    data.write_text("\n".join(json.dumps(x) for x in (good, {**good, "question": "a b " * 400}, good)))
    plan = tmp_path / "greedy.json"
    plan.write_text(pykvedge.plan("h2o", 0.1, recent=30).to_json())
    done = kvedge("eval", *model.arguments(), data, "--method", "h2o", "--plan", plan, "--json")
    assert done.code == 1
    assert {(r["method"], r["samples"]) for r in done.json["rows"]} == {("full", 2), ("h2o", 2)}
    assert [line.split(":")[0] for line in done.json["left_out"]] == ["greedy at 0.1 left out", "d"]
    assert "d:2 left out: the conversation and its answer have" in done.err


def test_models_that_cannot_be_compressed_are_measured_as_they_are(kvedge, tiny, native, tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "x", "answer": "y", "max_tokens": 3}) + "\n")
    done = kvedge("eval", *tiny("mamba").arguments(), data, "--method", "h2o,snapkv", "--json")
    assert done.code == 1 and {r["method"] for r in done.json["rows"]} == {"full"}
    assert [line.partition(" left out: ")[0] for line in done.json["left_out"]] == ["h2o at 0.2", "snapkv at 0.2"]


@pytest.mark.parametrize("kind", ["qwen2vl", "gemma3", "lfm2"])
def test_other_architectures_answer_as_in_a_session(tiny, native, picture_file, tmp_path, kind):
    """Copies of sequences with M-RoPE, sliding windows and recurrent layers."""
    model = tiny(kind)
    picture = picture_file() if kind == "qwen2vl" else None
    line = DialogMessage("user", "What is this, and why? " * 8, (picture,) if picture else ())
    sample = Sample("s", "t", (line,), "a thing", "rouge", max_tokens=6)
    cells = [Cell("h2o", pykvedge.plan("h2o", b)) for b in (0.5, 0.2)]
    rows = run([sample], cells, model.model, model.mmproj)
    for cell in (full_cell(), *cells):
        with model.session(cell.plan) as session:
            text = session.ask(line.text, [picture] if picture else [], Sampling(max_tokens=6)).read()
        assert rows["s", cell.name, str(cell.budget)]["answer"] == text.strip(), cell


def test_bad_input(refused, tiny, native, tmp_path):
    llama = tiny("llama").arguments()
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    refused("eval", *llama, empty).failed(2, "empty.jsonl has no samples")
    broken = tmp_path / "broken.jsonl"
    lines = [{"question": "x", "answer": "y"}] * 16 + [{"question": "x", "answer": "y", "images": ["none.png"]}]
    broken.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused("eval", *llama, broken).failed(2, "broken.jsonl line 17", "none.png does not exist")
    refused("eval", "--tasks", "colours").failed(2, "unknown task 'colours'; did you mean 'colour'?")
    refused("eval", "--method", "lokm").failed(2, "unknown method 'lokm'; did you mean 'lookm'?")
    refused("eval", "--budget", "0").failed(2, "budget must be at least 1")
    refused("eval", "--budget", "0.2,0.2,0.20").failed(2, "was given twice")
    refused("eval", "--metrics", "bleu").failed(2, "unknown metric 'bleu'")
    refused("eval", "--method", ",").failed(2, "--method is empty")
    refused("eval", "--resume").failed(2, "--resume needs")
    (tmp_path / "full.json").write_text(pykvedge.plan("snapkv", 0.2).to_json())
    refused("eval", "--plan", tmp_path / "full.json").failed(2, "the name 'full' is reserved")
    refused("eval", "--model", "none.gguf").failed(2, "none.gguf does not exist")
    refused("eval", "--samples", "0").failed(2, "--samples must be at least 1")
    twice = tmp_path / "twice"
    (twice / "images").mkdir(parents=True)
    item = {"sample_id": 7, "task_instruction_id": 0, "task_instance": {"context": "x", "images_path": []}}
    meta = {"task_instruction": ["Answer."], "question_type": "open-ended"}
    items = [{**item, "response": answer} for answer in "ab"]
    (twice / "twice.json").write_text(json.dumps({"meta_data": meta, "data": items}))
    refused("eval", *llama, twice).failed(2, "two samples have the same id twice:7")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_output_that_cannot_be_written_is_one_line(environment, tiny, native, tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "x", "answer": "y", "max_tokens": 2}))
    command = ["eval", *tiny("llama").arguments(), data, "--method", "full", "--quiet"]
    program = [sys.executable, "-m", "pykvedge", *map(str, command)]
    # with a buffer, as users have it: a failed write shows when the buffer is flushed, and once more at the end
    buffered = {k: v for k, v in environment.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, env=buffered, check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == "kvedge: error: the output cannot be written: No space left on device\n"


def test_images_without_an_encoder(kvedge, tiny, picture_file, native, tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "x", "answer": "y", "images": [str(picture_file())]}))
    kvedge("eval", *tiny("llama").arguments(), data).failed(1, "without an image encoder")


def test_every_method_has_a_colour_and_a_marker_of_its_own():
    names = [name for name in pykvedge.methods() if name != "full"]
    assert len({tuple(drawing.style(name).items()) for name in names}) == len(names) > 25
    assert len({drawing.style(name)["color"] for name in ("full", "stock", *drawing.FIRST)}) == len(drawing.FIRST) + 2
    assert drawing.style("of a plugin") != drawing.style("of another")


def test_points_lie_at_the_memory_kept_with_their_budgets_and_intervals_at_them():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    full = table.ResultRow(FULL, 1.0, table.ALL, 50, score=0.9, kv_bytes=1000.0)
    figures = ((0.5, 0.7, 510.0), (0.2, 0.65, 200.0), (0.19, 0.6, 195.0))
    made = [table.ResultRow("h2o", budget, table.ALL, 50, score=score, score_change=(-0.3, -0.1), kv_bytes=size)
            for budget, score, size in figures]  # fmt: skip
    axis = figure.subplots()
    plot.draw_panel(axis, plot.SCORE, plot.by_method([full, *made]), full, intervals=True)
    *bars, points, whole = [line.get_xydata().tolist() for line in axis.lines]
    assert points == [[0.195, 60], [0.2, 65], [0.51, 70]]
    assert bars == [[[x, pytest.approx(60)], [x, pytest.approx(80)]] for x, _ in points]
    assert [y for _, y in whole] == [90, 90] and axis.lines[-1].get_label() == "full cache"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0.5", "0.2"]  # 0.19 would overlap


def test_a_picture_of_what_it_costs(kvedge, native, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "e.svg"
    arguments = command(tmp_path / "r.jsonl", tasks="colour", samples=5)
    assert kvedge(*arguments, "--plot", picture).code == 0
    drawn = picture.read_text()
    words = re.findall(r"<text[^>]*>([^<]+)</text>", drawn)
    assert {"lookm", "full cache", "Right answers, %", "0.1"} <= set(words), words
    assert "n = 5 at each point" in " ".join(words) and "demo-model, colour" in " ".join(words)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )*([\d.]+)px", drawn)]
    width = re.search(r'<svg [^>]*width="([\d.]+)pt"', drawn)[1]
    assert len(sizes) >= len(words) and min(sizes) >= 7 and float(width) == pytest.approx(3.3 * 72)  # points
    kvedge(*arguments, "--resume", "--plot", tmp_path / "e.txt").failed(2, "--plot must end in .png")
