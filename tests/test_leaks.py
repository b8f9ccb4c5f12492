"""Nothing remains in memory after a method is detached from a model."""

import json
import subprocess
import sys

import pytest
from choosing import whole

METHODS = ("lookm", "flashcache", "mixkv", "elastic", "prefixkv")
MIB = 2**20


def chats(model: str, n: int) -> dict:
    """Runs attach, prompt, compress, generate, detach n times. Returns resident bytes after each, and the cache's."""
    import pykvedge
    from pykvedge.native import carried
    from pykvedge.system import memory

    carried.prepare()
    from llama_cpp import Llama

    llm = Llama(model, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    tokens = llm.tokenize(b"ab cd " * 60)
    sizes = []
    for i in range(n):
        attached = pykvedge.attach(llm, METHODS[i % len(METHODS)], 0.2)
        llm.eval(tokens)
        for _ in range(3):
            llm.eval([llm.sample(temp=0.0)])
        stats = attached.stats()
        attached.detach()
        sizes.append(memory.rss_bytes())
    return {"sizes": sizes, "cache": stats.before_bytes, "compressions": stats.n_compressions}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("n", [60, *whole(200)])
def test_chats_leave_nothing_behind(tiny, environment, native, n):
    # The system takes back large blocks at once; the C library would keep varying amounts.
    env = {**environment, "MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, __file__, str(tiny("llama").model), str(n)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["compressions"] == 1 and len(said["sizes"]) == n
    # a leak of one prompt's cache each time would be many times the limit
    assert (n - 10) * said["cache"] > 8 * MIB
    assert max(said["sizes"][10:]) - said["sizes"][9] < 2 * MIB, said["sizes"]


if __name__ == "__main__":
    print(json.dumps(chats(sys.argv[1], int(sys.argv[2]))))
