"""kvedge calibrate: the printed table, and the length of the answers that score heads."""

import numpy as np
import pytest
from conftest import DEMO

from kvedge_lab.calibrate import heads
from kvedge_lab.calibrate.heads import HeadScorer
from kvedge_lab.calibrate.samples import Labelled
from kvedge_lab.commands.calibrate import _table
from pykvedge.plans import profile


@pytest.mark.parametrize(("kind", "values", "budgets", "table"), [
    ("prefix", [[0.1, 0.75], [0.3, 0.45]], (0.2, 0.6),
     ["percent of the prompt kept at each budget", "layer       0.2      0.6", "    0      10.0     75.0",
      "    1      30.0     45.0"]),
    ("visual-heads", [[1, 3], [4, 0]], (),
     ["percent of all scores", "layer    head 0   head 1", "    0      12.5     37.5", "    1      50.0      0.0"]),
    ("retrieval-heads", [[1, 3], [4, 0]], (),
     ["percent of all scores", "layer    head 0   head 1", "    0      12.5     37.5", "    1      50.0      0.0"]),
    ("key-redundancy", [[0.25], [0.5]], (),
     ["mean similarity of two keys in percent", "layer    head 0", "    0      25.0", "    1      50.0"]),
    ("head-budgets", [[0.5, 0.25], [0.25, 0.0]], (),  # three heads have shares
     ["percent of an even share of the budget", "layer    head 0   head 1", "    0     150.0     75.0",
      "    1      75.0      0.0"]),
    ("visual-heads", np.arange(51).reshape(3, 17), (),  # too wide for a table: the best 16, the largest first
     ["percent of all scores", *(f"  layer 2, head {h}: {100 * (34 + h) / 1275:.1f}" for h in range(16, 0, -1))]),
])  # fmt: skip
def test_the_printed_table(kind, values, budgets, table):
    made = profile.Profile(kind, np.array(values), budgets, "", 7, {"model": {"name": "m.gguf"}})
    assert _table(made).splitlines() == [f"{kind} of m.gguf, 7 samples: {table[0]}", *table[1:]]


def test_the_answer_ends_with_the_model_or_where_it_is_long_enough(native, monkeypatch):
    question, generate, seen = "The code is 7KE4. What is the code?", HeadScorer._generate, []

    def noting(self, *given):
        seen.append(generate(self, *given))
        return seen[-1]

    monkeypatch.setattr(HeadScorer, "_generate", noting)
    with DEMO.session() as session:
        said = session.ask(question).read().strip()
        sample = Labelled(question, (), (), "7KE4", said)
        HeadScorer(session, "retrieval-heads").add(sample)
        monkeypatch.setattr(heads, "LONGEST_ANSWER", 2)
        HeadScorer(session, "retrieval-heads").add(sample)
    (texts, deserved), (two, of_two) = seen
    assert b"".join(texts).decode().strip() == said and len(deserved) == len(texts) > 2
    assert two == texts[:2] and len(of_two) == 2
