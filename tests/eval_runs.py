"""Runs of `kvedge eval` inside the tests' process."""

from conftest import THREADS

from kvedge_lab.eval.measure import MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Job, evaluate, full_cell
from pykvedge.runtime.settings import Settings
from pykvedge.system.files import DATA

MODEL, MMPROJ = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"


def run(samples, cells, model=MODEL, mmproj=MMPROJ, kv_type="f16", keep="", **options):
    """Evaluates samples with the full cache and with cells. Returns {(id, method, budget): record}."""
    settings = Settings(threads=THREADS, kv_type=kv_type, keep=keep)
    job = Job(model, mmproj, samples, [full_cell(), *cells], MeasureOptions(**options), settings)
    out = evaluate(job, Records(None, {}, False))
    assert not out.left_out and not out.interrupted
    return out.records.rows


def divergences(samples, cells):
    """Returns {name of a cell: mean divergence per token from the full cache}."""
    rows = run(samples, cells, answers=False)
    return {
        cell.name: sum(row["kld"] / row["tokens"] for key, row in rows.items() if key[1] == cell.name) / len(samples)
        for cell in cells
    }


def prompt(turns):
    """Returns the text of a conversation in the demo model's chat template."""
    forms = {"user": "USER: {}\n", "assistant": "ASSISTANT: {}</s>\n"}
    return "".join(forms[t["role"]].format(t["content"]) for t in turns) + "ASSISTANT:"
