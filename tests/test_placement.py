"""The planned devices of layers, against llama.cpp's placement, and the planned bytes against the used ones."""

import json
from dataclasses import replace

import pytest
from rpcserver import Server

from pykvedge.models.gguf import read_header
from pykvedge.models.placement import ConversationSize, _bytes_per_value, largest, place
from pykvedge.models.shape import ModelShape
from pykvedge.native import ggml
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime import loaded
from pykvedge.runtime.settings import Settings

MIB = 2**20


@pytest.fixture
def two_servers(environment, closing):
    return ",".join(closing(Server(environment)).address for _ in range(2))


def device(name, free_mib):
    return ggml.Device(0, name, name, "GPU", free_mib * MIB, free_mib * MIB)


@pytest.fixture
def planned(tiny):
    header = read_header(tiny("llama", n_layers=6).model)
    return header, ModelShape.of(header)


WORKER = """
import json, sys
import pykvedge
from pykvedge.native import ggml
from pykvedge.native.calls import lib
from pykvedge.runtime.settings import Settings
from pykvedge.models.gguf import read_header
from pykvedge.models.placement import ConversationSize
from pykvedge.reference.kvtypes import KvType
model, rpc = sys.argv[1:3]
plan = pykvedge.plan("knorm", 0.5)
for layers, kv_type in [*((n, "f16") for n in range(8)), (-1, "q8_0"), (-1, "f32"), ("auto", "f16")]:
    how = {"rpc": rpc, "gpu_layers": layers, "n_ctx": 512, "kv_type": kv_type}
    with pykvedge.Session(model, plan=plan, **how) as session:
        session.ask("word " * 60, sampling=pykvedge.Sampling(max_tokens=3)).read()
        cache = session.engine.cache
        names = [lib().kvedge_layer_device(cache.handle, i) for i in range(6)]
        offload = Settings(**how).offload
        tokens = cache.stats().n_tokens
        kept = cache.lengths()[0][0]
        found = offload.placement(read_header(model), ConversationSize(tokens, kept, KvType.parse(kv_type), 512))
        there = {i: share.device.name for share in found.shares for i in share.layers}
        print(json.dumps({
            "measured": [name and name.decode() for name in names],
            "planned": [there.get(i) for i in range(6)],
            "held": cache.stats().device_bytes,
            "kv_kept": sum(share.kv_kept for share in found.shares),
            "fits": found.fits,
        }))
"""


def test_layers_lie_where_they_are_planned(native, tiny, kvedge, two_servers):
    """For every number of layers on two servers: the device of each layer, and the bytes of the cache there."""
    done = kvedge(tiny("llama", n_layers=6, head_size=64).model, two_servers, program=("-c", WORKER))
    cases = [json.loads(line) for line in done.out.splitlines()]
    assert len(cases) == 11, done.err
    for case in cases:
        assert case["measured"] == case["planned"] and case["fits"]
        assert case["kv_kept"] <= case["held"] <= case["kv_kept"] + 64 * 1024
    assert all(any(case["planned"]) for case in cases[2:])
    assert cases[0]["measured"] == [None] * 6 and cases[0]["held"] == 0
    assert set(cases[-1]["measured"]) == set(cases[-2]["measured"]) == {"RPC0", "RPC1"}


def test_as_many_layers_as_fit(planned):
    """More memory holds more layers; a device too small for one gets none. Compression does not help the prompt."""
    header, shape = planned
    conversation = ConversationSize(4000, 400, KvType("f16", "f16"), 512, observes=False)
    everything = place(header, shape, [device("A", 10**6)], conversation, -1)
    need = everything.shares[0].needed
    assert everything.gpu_layers == 7 and everything.fits and need > 4000 * shape.kv_per_token(2)
    counts = []
    for percent in (2, 30, 60, 80, 95, 110, 200):
        found = largest(header, shape, [device("A", max(1, int(need * percent / 100 / 0.95 / MIB)))], conversation)
        assert found.fits and sum(len(share.layers) for share in found.shares) == max(found.gpu_layers - 1, 0)
        counts.append(found.gpu_layers)
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 7 and len(set(counts)) > 3
    assert largest(header, shape, [], conversation).gpu_layers == 0


def test_what_lies_on_a_device(planned):
    """The layers' weights add up to the file. Rows in f32 take twice the bytes of f16, rows on the host none."""
    header, shape = planned
    conversation = ConversationSize(1000, 100, KvType("f16", "f16"), 512, observes=False)
    all_of_it = place(header, shape, [device("A", 1000), device("B", 1000)], conversation, -1)
    assert [len(share.layers) for share in all_of_it.shares] == [4, 2] and all_of_it.shares[1].output
    sizes = [share.weights for share in all_of_it.shares]
    assert 0.9 * header.file_size < sum(sizes) + 1000 * shape.n_embd * 4 and sum(sizes) < header.file_size
    wide = replace(conversation, kv_type=KvType("f32", "f32"))
    double = place(header, shape, [device("A", 1000), device("B", 1000)], wide, -1)
    for one, two in zip(all_of_it.shares, double.shares, strict=True):
        assert two.kv_prompt == 2 * one.kv_prompt and two.weights == one.weights
    on_host = place(header, shape, [device("A", 1000)], replace(conversation, kv_type=None), -1)
    assert on_host.shares[0].kv_prompt == 0


def test_fit_tells_what_devices_take(kvedge, tiny, two_servers):
    model = tiny("llama", n_layers=6).model
    done = kvedge("fit", model, "--text", 2000, "--method", "knorm", "--rpc", two_servers, "--gpu-layers", 3, "--json")
    out = done.json
    assert out["gpu_layers"] == 3 and out["fits"]
    assert [(d["name"], d["layers"], d["output"]) for d in out["devices"]] == [
        ("RPC0", [4, 5], False),
        ("RPC1", [], True),
    ]
    table = kvedge("fit", model, "--rpc", two_servers, "--gpu-layers", "auto").out
    assert "RPC0 takes layers 1 to 4 of 6" in table and "RPC1 takes layers 5 to 6 of 6 and the output" in table
    none = kvedge("fit", model, "--json").json
    assert none["devices"] == [] and none["gpu_layers"] == 0


@pytest.mark.parametrize("layers", ["many", "-2", "1.5"])
def test_layers_that_are_no_number(kvedge, tiny, layers):
    kvedge("chat", *tiny("llama").arguments(), f"--gpu-layers={layers}", "hello").failed(2, layers.lstrip("-"))


def test_auto_makes_room_for_the_context_of_the_session(monkeypatch):
    """The context size of a session reaches the loading of its model."""

    class ReachedError(Exception):
        pass

    def loading(path, offload, *rest):
        raise ReachedError(offload.conversation)

    monkeypatch.setattr(loaded, "Model", loading)
    settings = Settings(gpu_layers="auto", n_ctx=9999, kv_type="q8_0")
    with pytest.raises(ReachedError) as reached:
        loaded.borrow("model.gguf", None, settings, loaded.silent, None)
    conversation = reached.value.args[0]
    assert conversation.prompt_tokens == 9999 and conversation.kv_type == KvType("q8_0", "q8_0")


@pytest.mark.parametrize(("kv_type", "read", "stored"), [
    (None, 0, 0), ("f16", 2, 2), ("f32", 4, 4), ("f32:f16", 3, 3), ("q8_0", 2, 34 / 32), ("q4_0", 2, 18 / 32),
    ("q8_0:q4_0", 0, 0), ("kivi2", 0, 0), ("kivi4:f16", 0, 0),
])  # fmt: skip
def test_rows_of_these_types_lie_on_devices(tiny, kv_type, read, stored):
    """Bytes of a number during a prompt and after it; 0 if no device computes with such rows."""
    shape = ModelShape.of(read_header(tiny("llama", head_size=64).model))
    assert _bytes_per_value(kv_type and KvType.parse(kv_type), shape) == (read, stored)
    narrow = ModelShape.of(read_header(tiny("llama", head_size=32).model))  # no flash attention
    assert _bytes_per_value(KvType.parse("q8_0"), narrow) == (0, 0)
