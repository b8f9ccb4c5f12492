"""Copying and pickling: which objects allow it. A copy of a session would close the original."""

import copy
import pickle

import pytest

import pykvedge
from pykvedge.errors import UsageError


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_has_memory_of_its_own_is_not_copied(tiny, native, way):
    with pykvedge.load(tiny("llama").model, threads=1) as model, pykvedge.Session(model) as session:
        answer = session.ask("Hello there", sampling=pykvedge.Sampling(max_tokens=4))
        for thing in (model, session, answer):
            with pytest.raises(UsageError, match=f"{type(thing).__name__} cannot be copied or pickled"):
                way(thing)
        assert answer.read()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
@pytest.mark.parametrize("plan", [
    pykvedge.plan("kvedge"),
    pykvedge.plan("lookm", 0.3),
    pykvedge.plan("snapkv", 128, **{"scorer.window": 8}, recent=16, sinks=4),
    pykvedge.plan("full").with_(image_tokens=0.5, pruner="residual"),
])  # fmt: skip
def test_a_plan_is_copied_equal(plan, way):
    other = way(plan)
    assert other == plan and hash(other) == hash(plan) and other.to_json() == plan.to_json()
