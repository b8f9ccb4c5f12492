"""Memory in the system's figures: dropped rows leave the process."""

import mmap
import re
import sys

import pytest
from choosing import whole
from waits import until

import pykvedge
from pykvedge import KvedgeError, OutOfMemoryError, Picture, Sampling
from pykvedge.native import libraries, llamacpp
from pykvedge.native.encoderwatch import EncoderWatch
from pykvedge.system import memory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MIB = 2**20


@linux
@pytest.mark.parametrize("method", ["lookm", *whole("streaming-llm", "h2o")])
def test_the_memory_of_the_prompt_is_given_back(kvedge, tiny, method):
    model = tiny("llama", n_layers=4, n_heads=8, n_heads_kv=8, head_size=128, weight="q8_0")
    options = ["--method", method, "--budget", "0.2", "--json", "--max-tokens", 2, "--ctx", 4096]
    report = kvedge("chat", *model.arguments(), *options, stdin="ab cd " * 350).json
    kv, rss = report["kv"], report["rss"]
    n = report["tokens"]["prompt"]
    assert kv["full_bytes"] >= n * 4 * 8 * 256 * 2 > 16 * MIB
    assert kv["kept_bytes"] / kv["full_bytes"] <= 0.21
    assert rss["peak_bytes"] - rss["after_compress_bytes"] >= 0.9 * (kv["full_bytes"] - kv["kept_bytes"])
    # scores and indices are small beside the keys and values
    assert kv["peak_bytes"] <= 1.1 * kv["full_bytes"]


@linux
def test_the_intermediate_results_of_the_prompt_are_given_back(kvedge, tiny):
    # the full cache drops nothing; the last layer computes only one token
    model = tiny("llama", n_layers=2, n_heads=16, n_heads_kv=16, head_size=128, weight="q8_0")
    options = ["--method", "full", "--verbose", "--json", "--max-tokens", 2]
    done = kvedge("chat", *model.arguments(), *options, stdin="ab " * 270)
    sizes = re.findall(r"sched_reserve: +CPU compute buffer size = +([\d.]+) MiB", done.err)
    buffer, rss = float(sizes[-1]) * MIB, done.json["rss"]
    assert buffer > 25 * MIB
    assert rss["peak_bytes"] - rss["after_compress_bytes"] > 0.6 * buffer


@linux
def test_the_working_memory_of_the_image_encoder_is_given_back(tiny, native, monkeypatch):
    sizes = (840, 420, 840 - 28)
    pictures = [Picture(f"{n}", n, n, (bytes(range(256)) * (n * n * 3 // 256 + 1))[: n * n * 3]) for n in sizes]
    release, seen = EncoderWatch.release, []

    def watched(self) -> int:
        before = memory.rss_bytes()
        size = release(self)
        seen.append((size, before - memory.rss_bytes()))
        return size

    def answer() -> str:
        with tiny("qwen2vl").session(pykvedge.plan("full")) as session:
            return session.ask("What are these?", pictures, Sampling(max_tokens=8)).read()

    monkeypatch.setattr(EncoderWatch, "release", watched)
    first = answer()
    assert len(seen) == 3 and seen[0][0] > 4 * MIB
    for (size, freed), share in zip(seen, (0.9, 0.2, 0.9), strict=True):  # the buffer keeps its size
        assert freed > share * size, seen
    monkeypatch.setattr(EncoderWatch, "release", lambda self: 0)
    assert answer() == first


@linux
def test_a_large_context_costs_nothing_until_it_is_filled(kvedge, tiny):
    model = tiny("llama", n_layers=4, n_heads=8, n_heads_kv=8, head_size=128, weight="q8_0")
    options = ["--json", "--max-tokens", 2, "--method", "full"]
    small = kvedge("chat", *model.arguments(), *options, "--ctx", 1024, "Hello").json["rss"]["peak_bytes"]
    large = kvedge("chat", *model.arguments(), *options, "--ctx", 8192, "Hello").json["rss"]["peak_bytes"]
    whole = 8192 * 4 * 8 * 256 * 2  # llama.cpp's allocation for this context
    assert large - small < whole / 4


def looked(meter):
    """Waits until the meter's thread has sampled the present memory."""
    looks, look = [], meter._look

    def noted():
        looks.append(look())
        return looks[-1]

    meter._look = noted
    until(lambda: looks)
    meter._look = look


@linux
def test_what_the_system_says():
    before = memory.rss_bytes()  # the system may take some of it back
    assert before > 5 * MIB
    meter = memory.PeakMeter()
    meter.start()
    with mmap.mmap(-1, 256 * MIB) as block:  # the heap may already have as many resident free bytes
        block[::4096] = b"x" * len(block[::4096])
        looked(meter)
    assert meter.stop() >= before + 200 * MIB
    # the process's high-water mark still contains the block; the value of a new meter must not
    meter = memory.PeakMeter()
    meter.start()
    assert meter.stop() < before + 200 * MIB
    assert meter.stop() < before + 200 * MIB


@linux
def test_a_peak_is_what_the_system_notes_and_the_system_goes_on_noting_it(started):
    """In a separate process, as VmHWM only grows. The block is shorter-lived than the meter's interval."""
    code = """
import re, sys
from pathlib import Path
from pykvedge.native import libraries, llamacpp
from pykvedge.system import memory

def high():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def touch(n):
    block = bytearray(n << 20)
    block[::4096] = b"x" * len(block[::4096])

memory.PeakMeter._INTERVAL_S = 1e6
before = memory.rss_bytes()
meter = memory.PeakMeter()
meter.start()
touch(96)
first, mark = meter.stop(), high()
meter = memory.PeakMeter()
meter.start()
touch(8)
print(before, first, mark, meter.stop(), high())
"""
    before, first, mark, second, mark_after = map(int, started(program=("-c", code)).out.split())
    assert first == pytest.approx(mark, abs=MIB) and first >= before + 90 * MIB
    assert mark_after >= mark and second < first - 80 * MIB  # the mark was neither reset nor taken for the second peak


def test_a_peak_that_is_not_the_highest_is_seen_by_looking(monkeypatch):
    monkeypatch.setattr(memory, "_highest_bytes", lambda: 0)
    meter = memory.PeakMeter()
    meter.start()
    block = bytearray(64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    low = memory.rss_bytes()
    looked(meter)
    del block
    assert meter.stop() >= low - 32 * MIB


def test_a_message_is_watched_by_a_thread_only_if_the_peak_was_asked_for(tiny, native, monkeypatch):
    import threading

    seen = []
    start = threading.Thread.start

    def noted(self):
        seen.append(self.name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    for settings, n, known in [({}, 0, False), ({"measure_peak": True}, 1, True)]:
        seen.clear()
        with tiny("llama").session(pykvedge.plan("h2o"), **settings) as session:
            answer = session.ask("Hello there.", sampling=Sampling(max_tokens=2))
            answer.read()
        peak = answer.report.rss.peak_bytes
        assert seen.count("kvedge-peak") == n and (peak is not None) == known
        assert not known or peak >= answer.report.rss.before_prefill_bytes
    assert not any(t.name == "kvedge-peak" for t in threading.enumerate())


@linux
def test_what_is_available_respects_limits(started):
    assert memory.available_bytes() > 10 * MIB
    code = (
        "import resource, pykvedge.system.memory as m; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "print(m.available_bytes())"
    )
    assert 0 < int(started(program=("-c", code)).out) < 1 << 30


def test_requirements_are_explained(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * MIB)
    memory.require(2 * MIB, "this", "do that")
    with pytest.raises(OutOfMemoryError, match=r"this needs about 4\.0 MiB, 3\.0 MiB are available; do that"):
        memory.require(4 * MIB, "this", "do that")
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.require(1 << 60, "this", "do that")


def test_readable_sizes():
    assert [memory.readable(n) for n in (512, 5 * MIB, 3 << 30)] == ["0.5 KiB", "5.0 MiB", "3.0 GiB"]


@pytest.mark.parametrize(("why", "kind"), [
    ("failed to allocate a buffer", OutOfMemoryError), ("no memory for the KV cache", OutOfMemoryError),
    ("the model has no layers", KvedgeError),
])  # fmt: skip
def test_a_context_that_cannot_be_made_for_want_of_memory_says_so(native, tiny, monkeypatch, why, kind):
    with tiny("llama").session() as session:
        monkeypatch.setattr(libraries.llama(), "llama_init_from_model", lambda *given: None)
        monkeypatch.setattr(llamacpp, "reason", lambda lines, otherwise: why)
        with pytest.raises(KvedgeError, match=f"cannot be created: {why}; lower --ctx") as raised:
            session.ask("Hello there.")
    assert type(raised.value) is kind


GIB = 1 << 30


@pytest.mark.parametrize(
    ("lines", "groups", "limit", "available"),
    [  # folder: (limit, in use, reclaimable page cache)
        ("0::/a.slice/b.service", {"a.slice/b.service": (3, 2, 1), "a.slice": (4, 4, 1), "": ("max", 9, 0)}, 3, 1),
        ("0::/a.slice/b.service", {"a.slice/b.service": ("max", 1, 0), "a.slice": ("max", 1, 0)}, None, None),
        ("0::/host/path", {"": (2, 1, 0)}, 2, 1),  # in a container
        ("2:memory:/x/y\n0::/", {"memory/x/y": (8, 1, 0), "memory/x": (5, 2, 1), "memory": (2**33, 9, 0)}, 5, 4),
        ("2:memory:/host", {"memory": (2, 3, 0)}, 2, 0),
    ],
)  # fmt: skip
def test_the_least_limit_from_the_own_control_group_up_counts(tmp_path, monkeypatch, lines, groups, limit, available):
    for name, (most, used, cache) in groups.items():
        (folder := tmp_path / name).mkdir(parents=True, exist_ok=True)
        first = name.startswith("memory")
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        (folder / files[0]).write_text(f"{most if most == 'max' else most * GIB}\n")
        (folder / files[1]).write_text(f"{used * GIB}\n")
        kind = "total_inactive_file" if first else "inactive_file"
        (folder / "memory.stat").write_text(f"anon 5\n{kind} {cache * GIB}\n")
    (tmp_path / "of_process").write_text(lines + "\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS_OF_PROCESS", tmp_path / "of_process")
    assert memory.cgroup_limit() == (None if limit is None else limit * GIB)
    assert memory._cgroup_available() == (None if available is None else available * GIB)


def test_a_server_takes_half_of_what_its_control_group_leaves(tmp_path, monkeypatch):
    from pykvedge.serve.server import free_memory_share

    for name, text in (("memory.max", GIB), ("memory.current", GIB * 3 // 4), ("memory.stat", "inactive_file 0")):
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS_OF_PROCESS", tmp_path / "none")
    assert free_memory_share() == GIB // 8
