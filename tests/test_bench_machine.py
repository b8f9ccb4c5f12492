"""Measurements of the machine in kvedge bench: weights per token, bandwidth, energy, other programs, memory."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from waits import until

from kvedge_lab.bench import machine
from pykvedge.models.gguf import read_header, tensor_bytes


def test_weights_that_a_token_reads(tiny):
    header = read_header(tiny("llama").model)
    everything = sum(tensor_bytes(t) for t in header.tensors.values())
    embedding = header.tensors["token_embd.weight"]
    rows = embedding.shape[-1]
    read = machine.weight_bytes_per_token(header)
    if "output.weight" in header.tensors:
        assert read == everything - tensor_bytes(embedding) * (rows - 1) // rows
    else:
        assert read == everything
    tied = replace(header, tensors={"token_embd.weight": embedding})
    assert machine.weight_bytes_per_token(tied) == tensor_bytes(embedding)
    experts = replace(header, tensors={"blk.0.ffn_up_exps.weight": embedding, "output.weight": embedding},
                      values={**header.values, "llama.expert_count": 8, "llama.expert_used_count": 2})  # fmt: skip
    assert machine.weight_bytes_per_token(experts) == tensor_bytes(embedding) * 5 // 4


def test_bandwidth_is_that_of_a_copy_within_reason():
    """Reading is at most some times slower than copying, which reads and writes. No machine reads 10 TB/s."""
    bandwidth = machine.Bandwidth(1)
    found = bandwidth.bytes_per_second(100e6)
    a = np.ones(8 << 20)
    b = np.empty_like(a)
    copies = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(b, a)
        copies.append(a.nbytes / (time.perf_counter() - started))
    assert max(copies) / 8 < found < 1e13
    assert bandwidth.bytes_per_second(100e6) == found  # measured once


def test_energy_is_read_where_the_system_tells(tmp_path):
    def zone(name, uj, span=1000_000_000):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "energy_uj").write_text(str(uj))
        (tmp_path / name / "max_energy_range_uj").write_text(str(span))

    assert not machine.Energy(tmp_path).known and machine.Energy(tmp_path).joules() is None
    zone("intel-rapl:0", 5_000_000)
    zone("intel-rapl:1", 999_000_000)
    zone("intel-rapl:0:0", 7)  # a part of the first zone
    energy = machine.Energy(tmp_path)
    energy.start()
    zone("intel-rapl:0", 8_000_000)
    zone("intel-rapl:1", 1_000_000)  # this counter overflowed
    assert energy.known and energy.joules() == pytest.approx(3 + 2)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert energy.joules() is None


def test_others_are_what_this_process_is_not():
    """Counts the time of another program, and never the time of this process."""
    others = machine.OtherPrograms()
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.6)
    finally:
        worker.kill()
        worker.wait()
    taken, wall = others.taken()
    assert wall >= 0.6 and taken >= 0.2  # a busy machine gives the program only a share of a CPU
    others = machine.OtherPrograms()
    began = time.process_time()
    while time.process_time() - began < 0.5:
        pass
    taken, wall = others.taken()
    cores = os.cpu_count() or 1
    assert taken <= cores * wall - 0.4


def test_a_watch_sees_memory_come_and_go():
    size = 64 << 20
    with machine.Watch() as watch:

        def seen(block=None):
            n = len(watch.n_bytes)
            until(lambda: len(watch.n_bytes) >= n + 2)  # the first sample may have begun earlier
            return watch.n_bytes[n + 1]

        before, held, after = seen(), seen(bytearray(size)), seen()
    assert held - before > 0.9 * size and after - before < 0.3 * size
    assert watch.n_bytes[-1] - before < 0.3 * size
    assert watch.seconds == sorted(watch.seconds) and len(watch.seconds) == len(watch.n_bytes)
