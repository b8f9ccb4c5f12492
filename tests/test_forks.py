"""After a fork, both processes can use the model, and both can end."""

import os

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")

# an alarm ends a child that waits for threads that do not exist in it; the place of the threads at a fork is random
ATTACHED = """
import os, signal, sys
import pykvedge
from llama_cpp import Llama

model, keep = sys.argv[1:]
llm = Llama(model, n_ctx=1024, n_threads=3, n_threads_batch=3, verbose=False)
attached = pykvedge.attach(llm, "snapkv", 0.3, keep=keep)
words = "The quick brown fox jumps over the lazy dog. " * 6
ask = lambda text: llm(text, max_tokens=8, temperature=0.0)["choices"][0]["text"]
answer = ask(words)
while keep == "disk" and not attached.stats().whole_file_bytes:
    llm.eval([5])
for how in ("ends", "closes", "asks") * 3:
    child = os.fork()
    if not child:
        signal.alarm(60)
    more = (" And then?", " And then? Nothing, it says.") if how == "asks" else ()
    said = [ask(words + answer + text) for text in more]
    if keep and said:
        attached.stats().whole_bytes or sys.exit("no whole rows")
    if child:
        print([how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said], flush=True)
    else:
        print(said, file=sys.stderr)
        if how == "closes":
            llm.close()
        break
"""


@pytest.mark.parametrize("keep", ["", "disk"])
def test_a_child_answers_as_its_parent_and_ends(native, tiny, started, tmp_path, keep):
    done = started(tiny("llama").model, keep, program=("-c", ATTACHED), cwd=tmp_path, timeout=300)
    assert done.code == 0, done.err[-2000:]
    forks = [eval(line) for line in done.out.splitlines()]
    assert [how for how, _, _ in forks] == ["ends", "closes", "asks"] * 3
    assert all(code == 0 for _, code, _ in forks), done.err[-2000:]
    assert done.err.splitlines() == [str(said) for _, _, said in forks]
