"""Layers on devices: the CPU through ggml's operations, and a server on loopback (memory of another process)."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import warnings

import pytest
from attached import case_of, differing
from choosing import distinct, whole
from conftest import DEMO, QUICK_BENCH, ROOT
from forking import Warm
from rpcserver import Counting, Server

import pykvedge
from pykvedge.models.offload import Offload
from pykvedge.native import backends, ggml

SCENE = [("What is the code?", [ROOT / "examples" / "scene-1.png"]), ("What shape is red?", [])]
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. "
SHAPES = {"GQA": ("llava", {}), "MHA": ("llava", {"n_heads_kv": 4}), "M-RoPE": ("qwen2vl", {})}
ALIKE = ("full", "lookm", "mixkv", "adakv", "flashcache")  # answers about the scene without ties
TIES = 0.005  # of two nearly equal scores, either pair may stay


@pytest.fixture(scope="module")
def server(environment):
    running = Server(environment)
    yield running
    running.close()


@pytest.fixture
def chosen(pytestconfig):
    """The methods of a test: with --all, every method."""
    return pykvedge.methods() if pytestconfig.getoption("all") else list(distinct())


@pytest.fixture
def talked(worker):
    """talked(cases, **settings) -> the held tokens and the answers of each case."""
    return lambda cases, **settings: worker("device_worker.py", {"cases": cases, "settings": settings})


def same(host, device, cases) -> None:
    """Compares the held tokens after each message, up to a different answer: random weights give near ties."""
    other = 0
    for case, here, there in zip(cases, host, device, strict=True):
        name = json.loads(case["plan"])["method"]
        assert not any(here["device_bytes"])
        for turn in range(len(case["messages"])):
            assert differing(here["held"][turn], there["held"][turn]) <= TIES, name
            if here["answers"][turn] != there["answers"][turn]:
                other += 1
                break
    assert other <= len(cases) / 3  # tied tokens of a prompt affect many methods


@pytest.mark.parametrize("shape", ["GQA", "M-RoPE", *whole("MHA")])  # many KV heads: in the next test
def test_every_method_keeps_on_a_device_what_it_keeps_on_the_host(
    tiny, picture_file, profile_file, talked, server, shape, chosen
):
    """Two messages, one of them with images. In the end rows are on the device, also if answers drop some rows.

    One shape of heads runs all methods on the server, which only has ggml's operations. Other shapes run some methods.
    """
    every = len(chosen) == len(pykvedge.methods())
    if shape != "GQA":
        chosen = ALIKE if every else ALIKE[1:3]
    ours = [name for name in chosen if name in (*ALIKE, "kvedge") or every]
    kind, sizes = SHAPES[shape]
    files = tiny(kind, **sizes)
    images = [picture_file(), picture_file("b.png", 60, 90)]
    messages = [(WORDS * 5, images), (WORDS * 2, [])]
    cases = [case_of(files, method, messages, profile_file) for method in chosen]
    host = talked(cases)
    for names, settings in ((chosen, {"rpc": server.address}), (ours, {"device": "CPU"})):
        there = talked([case for name, case in zip(chosen, cases, strict=True) if name in names], **settings)
        known = [case for name, case in zip(chosen, host, strict=True) if name in names]
        same(known, there, [case for name, case in zip(chosen, cases, strict=True) if name in names])
        assert all(case["device_bytes"][-1] for case in there)


def test_heads_of_different_lengths(native, tiny, talked, server, profile_file):
    """Eight KV heads with different numbers of pairs: in one list on the CPU, in groups on the server."""
    files = tiny("llama", head_size=64, n_heads=8, n_heads_kv=8, n_layers=3)
    cases = [case_of(files, method, [(WORDS * 12, [])], profile_file) for method in ("adakv", "mixkv-ada", "pyramidkv")]
    host = talked(cases)
    assert len({len(head) for head in host[0]["held"][0][-1]}) > 4
    graph = talked(cases, device="CPU")
    remote = talked(cases, rpc=server.address)
    for there in (graph, remote):
        same(host, there, cases)
        assert all(case["device_bytes"][-1] > 0 for case in there)
    row, heads, layers = 2 * 64 * 4, 8, 3  # f32
    for case in graph:
        kept = sum(len(head) for layer in case["held"][0] for head in layer)
        room = layers * heads * 128 + kept // 32  # for later tokens
        assert kept * row < case["device_bytes"][0] <= (kept + room) * row + 16 * 1024  # without a mask


def test_the_demo_model_answers_alike(native, talked, server, own_server, profile_file, pytestconfig):
    """A trained model has no ties: right answers are right on every device, and the same pairs are kept."""
    chosen = pykvedge.methods() if pytestconfig.getoption("all") else ALIKE
    cases = [case_of(DEMO, method, SCENE, profile_file) for method in chosen]
    host = talked(cases)
    right = [case["answers"] == host[chosen.index("full")]["answers"] for case in host]
    assert sum(right) > 0.6 * len(chosen)  # other methods keep too little for this model, or the wrong pairs
    two = {"rpc": f"{server.address},{own_server.address}"}
    split = len(chosen) if pytestconfig.getoption("all") else 2  # methods with layers in two places
    for n, settings in (
        (len(chosen), {"device": "CPU"}), (len(chosen), {"rpc": server.address}),
        (split, two), (split, {"rpc": server.address, "gpu_layers": 2}),
    ):  # fmt: skip
        there = talked(cases[:n], **settings)
        assert all(case["device_bytes"][-1] > 0 for case in there)
        for method, here, case, known in zip(chosen[:n], host[:n], there, right[:n], strict=True):
            assert not (known or method in ALIKE) or case["answers"] == here["answers"], method
            for turn in range(len(SCENE)):
                if here["answers"][turn] != case["answers"][turn]:
                    break  # wrong answers end at any place, and they are held, too
                assert differing(here["held"][turn], case["held"][turn]) <= TIES, method


def test_quantised_rows(native, talked, server, profile_file):
    """Answers from q8_0 and q4_0 rows on a device equal those on the host, and the rows are smaller."""
    cases = [case_of(DEMO, method, SCENE, profile_file, 0.7) for method in ("full", "lookm")]
    held = {}
    for kv_type in ("f16", "q8_0", "q4_0"):
        host = talked(cases, kv_type=kv_type, kv_rotate="off")  # as on devices
        for settings in ({"device": "CPU"}, {"rpc": server.address}):
            if settings == {"device": "CPU"} and kv_type == "f16":
                continue  # as in the test above
            there = talked(cases, kv_type=kv_type, **settings)
            assert [case["answers"] for case in there] == [case["answers"] for case in host]
            held[kv_type] = [case["device_bytes"][-1] for case in there]
    for plain, eight, four in zip(*held.values(), strict=True):
        assert 0 < four < eight < plain
    lookm = [held[kv_type][1] for kv_type in held]  # its buffers were made for the answer
    assert lookm[1] < 0.56 * lookm[0] and lookm[2] < 0.32 * lookm[0]  # 34 and 18 bytes for 64, and masks
    other = talked(cases[:1], kv_type="q8_0:q4_0", device="CPU")
    assert not any(other[0]["device_bytes"])  # not every device has flash attention of two types


MHA = {"head_size": 64, "n_heads": 4, "n_heads_kv": 4}


@pytest.mark.parametrize(
    ("parts", "shape", "kv_type"),  # parts: splits of a graph; a server's first part runs on the CPU
    [(1, {}, "f16"), (1, MHA, "f32"), (2, MHA, "f16"), *whole((1, {}, "f32"), (1, MHA, "f16"), (2, {}, "f16"),
     (2, {}, "f32"), (2, MHA, "f32"))],
)  # fmt: skip
def test_a_device_computes_what_llama_cpp_has_it_compute(native, tiny, worker, server, parts, shape, kv_type):
    """Compares logits and graph splits with llama.cpp on the same device, before and after the compression."""
    plans = [pykvedge.plan("full"), *(pykvedge.plan(name, 0.4) for name in ("lookm", "adakv", "elastic", "kvedge"))]
    job = {
        "model": str(tiny("llama", **shape).model),
        "rpc": server.address if parts == 2 else "",
        "kv_type": kv_type,
        "prompt": 300,
        "plans": [plan.to_json() for plan in plans],
    }
    full, *others = worker("device_logits.py", job)
    print(f"KL {full['kl']:.1e} with {kv_type}")
    assert full["kl"] < 1e-4
    for found in (full, *others):
        assert found["device_bytes"] > 0
        assert found["splits"]["stock"] == found["splits"]["kvedge"] == {"prompt": [parts], "token": [parts]}


WIDE = {"head_size": 64, "n_heads": 8, "n_heads_kv": 8}  # two merges of this model tie
LATER = [({}, "f16", 1e-4), (WIDE, "f32", 1e-4), ({"head_size": 64}, "q8_0", 2e-3)]  # q8_0 rounds an answer at once


@pytest.mark.parametrize(
    ("parts", "kind"),
    [(1, LATER[1]), (2, LATER[2]), *whole((1, LATER[0]), (1, LATER[2]), (2, LATER[0]), (2, LATER[1]))],
)
def test_later_messages_attend_where_the_rows_are(native, tiny, worker, server, parts, kind):
    """With heads of different lengths, biases and quantised rows: the host's logits, and rows stay on the device."""
    shape, kv_type, most = kind  # most: the largest divergence
    mass = pykvedge.plan("adakv", 0.3, reducer="averaged", **{"reducer.bias": "mass"})
    names = ("adakv", "kvedge") if parts == 2 else ("adakv",)
    plans = [*(pykvedge.plan(name, 0.4) for name in names), mass]
    job = {
        "model": str(tiny("llama", **shape).model),
        "rpc": server.address if parts == 2 else "",
        "kv_type": kv_type,
        "prompt": 700,
        "later": [40, 2, 1300 if len(shape) > 1 else 300, 30],  # 1300: a mask of two parts, and new buffers
        "plans": [plan.to_json() for plan in plans],
    }
    for plan, found in zip(plans, worker("device_logits.py", job), strict=True):
        print(f"KL {found['from_host']:.1e} with {kv_type}")
        assert found["from_host"] < most, plan
        assert all(n > 0 for n in found["later"]), plan
        assert found["splits"]["stock"] == found["splits"]["kvedge"]


def test_a_prompt_that_comes_in_pieces(native, tiny, worker, server):
    """Gathered data stays on the device from piece to piece, and moves to the host together with the rows."""
    plans = [pykvedge.plan(name, 0.3) for name in ("snapkv", "mixkv", "h2o", "roco")]
    plans.append(pykvedge.plan("h2o", 0.3, allocator="entropy", **{"allocator.attention": "full"}))
    job = {"model": str(tiny("llama", weight="f32").model), "plans": [plan.to_json() for plan in plans]}
    host = worker("device_prompts.py", {**job, "devices": "none"})
    assert not any(any(case["device_bytes"]) for case in host)
    for rpc in ("", server.address):
        there = worker("device_prompts.py", {**job, "devices": "all", "rpc": rpc})
        for plan, here, case in zip(plans, host, there, strict=True):
            assert all(case["device_bytes"])
            for sequence, held in enumerate(here["held"]):
                assert differing(held, case["held"][sequence]) <= TIES, f"{plan.method}, sequence {sequence}"


def chat(environment, files, *options):
    command = [sys.executable, "-m", "pykvedge", "chat", "--ctx", "16000", *files.arguments(), *map(str, options)]
    return Warm(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_servers_memory_shrinks(native, tiny, environment, own_server):
    """The server's memory during an answer to 3,000 tokens: 64 kept pairs take less by the dropped ones."""
    files = tiny("llama")
    prompt = "word " * 1000  # at least 3 tokens each
    used = {}
    for options in (["--method", "full"], ["--method", "knorm", "--budget", "64"]):
        talking = chat(environment, files, "--rpc", own_server.address, "--kv-type", "f32", "--max-tokens", "8000",
                       *options, prompt)  # fmt: skip
        assert len(talking.stdout.read(40)) == 40
        used[options[1]] = own_server.memory()
        talking.kill()
        talking.communicate()
    pairs = 2 * 2 * (64 + 64) * 4  # bytes of a token in f32: layers, KV heads, keys and values
    assert used["full"] - used["knorm"] >= 0.9 * (3000 - 64) * pairs


@pytest.mark.parametrize("method", ["snapkv", "h2o", "roco"])
def test_nothing_comes_back_for_a_piece_of_a_prompt(native, tiny, worker, own_server, method):
    """The server sends no queries and no sums, only its replies about new tensors and buffers."""
    returned = []
    for pieces in (2, 6):
        wire = Counting(own_server.address)
        plans = [pykvedge.plan(method, 0.3).to_json()]
        job = {"model": str(tiny("llama").model), "plans": plans, "devices": "all", "rpc": wire.address}
        worker("device_prompts.py", {**job, "pieces": pieces})
        returned.append(wire.received)
    print(f"{(returned[1] - returned[0]) / 4:.0f} bytes for a piece")
    assert returned[1] - returned[0] < 4 * 512


def test_the_whole_cache_is_not_said_to_be_larger_on_a_device(native, tiny, kvedge):
    """The report compares kept pairs with the rows of all tokens; a device also has masks, queries and free rows."""
    files = tiny("llama", head_size=64, n_heads=4, n_heads_kv=2, n_layers=3)
    options = [*files.arguments(), "--device", "CPU", "--method", "kvedge", "--budget", "0.2", "--json"]
    told = kvedge("chat", *options, "--max-tokens", "4", "word " * 700).json
    small = ["--images", 0, "--tokens", 700, "--repeat", 1, "--generate", 4]
    row = kvedge("bench", *options, *small, script=QUICK_BENCH).json["rows"][-1]
    full = kvedge("chat", *files.arguments(), "--device", "CPU", "--method", "full", "--json", "x " * 700).json
    assert full["kv"]["kept_bytes"] == full["kv"]["full_bytes"] == full["tokens"]["prompt"] * 3 * 2 * (64 + 64) * 2
    in_bench = {name: row[f"kv_{name}"] for name in ("full_bytes", "kept_bytes", "peak_bytes")}
    assert told["device"]["compressed"] and row["device_compressed"]
    for kv, tokens in ((told["kv"], told["tokens"]["prompt"]), (in_bench, row["tokens"])):
        rows = tokens * 3 * 2 * (64 + 64) * 2  # layers, KV heads, keys and values in f16
        assert rows <= kv["full_bytes"] <= 1.05 * rows
        assert 0.19 * rows <= kv["kept_bytes"] <= 0.22 * rows and rows < kv["peak_bytes"]


def test_an_evaluation_counts_the_bytes_of_rows_on_a_device(native, kvedge, tmp_path):
    """By which `tune` chooses. On the host rows lie in whole pages, so there are a few more."""
    asked = ["eval", "--tasks", "code", "--samples", 1, "--method", "snapkv,kvedge", "--budget", "0.2", "--quiet"]
    found = []
    for device in ("none", "CPU"):
        assert kvedge(*asked, "--device", device, "--save", tmp_path / device).code == 0
        found.append([json.loads(line) for line in (tmp_path / device).read_text().splitlines()[1:]])
    for host, there in zip(*found, strict=True):
        assert there["kept"] == host["kept"]
        for figure in ("full_bytes", "kept_bytes"):
            assert 0.85 * host[figure] < there[figure] <= host[figure], (there["method"], figure)


@pytest.mark.parametrize("exact", [[], ["--keep", "ram", "--exact"]], ids=["plain", "exact"])
def test_no_keys_and_values_travel_for_a_token(native, tiny, kvedge, own_server, exact):
    """50 more answer tokens take equally many bytes after prompts of two lengths, except 2 bytes of mask for each pair.

    Verified tokens attend to whole rows on the host: their query, key, value and attention travel to the host and back.
    """
    files = tiny("llama")
    kept, a_token = [], []
    for n_words in (200, 700):
        sums = []
        for n_answer in (10, 60):
            wire = Counting(own_server.address)
            options = ["--rpc", wire.address, "--method", "knorm", "--budget", "0.5", "--max-tokens", n_answer, *exact]
            tokens = kvedge("chat", *files.arguments(), *options, "--json", "word " * n_words).json["tokens"]
            assert tokens["generated"] == n_answer
            sums.append(wire.bytes)
        kept.append(tokens["prompt"] // 2)
        a_token.append((sums[1] - sums[0]) / 50)
    more = kept[1] - kept[0]
    rows = 2 * 2 * (32 + 32) * 2  # bytes of a token's keys and values in f16
    print(f"{a_token[0]:.0f} bytes a token with {kept[0]} pairs, {a_token[1]:.0f} with {kept[1]}")
    assert 2 * (more + 256) < rows * more / 50
    # the number of drafted and verified tokens depends on their time
    assert a_token[1] - a_token[0] <= (rows * more / 20 if exact else 2 * (more + 256))


@pytest.mark.parametrize(
    ("method", "kv_type"),
    [("adakv", "f16"), ("kvedge", "q8_0"), *whole(("adakv", "q8_0"), ("kvedge", "f16"), ("snapkv", "f16"),
     ("snapkv", "q8_0"))],
)  # fmt: skip
def test_no_keys_and_values_travel_for_a_later_message(native, tiny, worker, own_server, method, kv_type):
    """A message of 16 tokens and one answer token take less than half the bytes of the keys and values."""
    heads, size, layers = 8, 64, 2
    job = {
        "model": str(tiny("llama", head_size=size, n_heads=heads, n_heads_kv=heads).model),
        "kv_type": kv_type,
        "prompt": 1000,
        "plans": [pykvedge.plan(method, 0.4).to_json()],
        "alone": True,
    }
    sums = []
    for later in ([], [16]):
        wire = Counting(own_server.address)
        worker("device_logits.py", {**job, "rpc": wire.address, "later": later})
        sums.append(wire.bytes)
    held = layers * heads * 400 * 2 * size * (2 if kv_type == "f16" else 34 / 32)
    print(f"{sums[1] - sums[0]} bytes for a message over {held:.0f}")
    assert 0 < sums[1] - sums[0] < held / 2


def test_no_whole_rows_travel_for_a_later_message(native, tiny, worker, own_server):
    """The host has the whole rows, so a short message attends there. Counts its bytes, with an answer of 12 tokens."""
    heads, size, layers = 8, 64, 2
    model = str(tiny("llama", head_size=size, n_heads=heads, n_heads_kv=heads).model)
    said = [("word " * 600, []), ("Why?", [])]
    case = {"model": model, "mmproj": None, "profile": None, "plan": pykvedge.plan("snapkv", 0.1).to_json()}
    sums, held = [], []
    for messages in (said[:1], said):
        wire = Counting(own_server.address)
        settings = {"rpc": wire.address, "gpu_layers": 99, "keep": "ram"}
        (out,) = worker("device_worker.py", {"settings": settings, "cases": [{**case, "messages": messages}]})
        assert out["device_bytes"][-1] > 0  # rows of the answer
        sums.append(wire.bytes)
        held.append(out["held"])
    (host,) = worker("device_worker.py", {"settings": {"keep": "ram"}, "cases": [{**case, "messages": said}]})
    assert differing(host["held"][1], held[1][1]) <= TIES
    rows = layers * heads * 1800 * 2 * size * 4
    print(f"{sums[1] - sums[0]} bytes for a message over {rows}")
    assert 0 < sums[1] - sums[0] < rows / 2


def test_a_server_that_dies_is_one_line(native, tiny, environment, own_server):
    talking = chat(environment, tiny("llama"), "--rpc", own_server.address, "--max-tokens", "15000", "hello")
    assert talking.stdout.read(1)
    own_server.close()
    _, err = talking.communicate(timeout=60)
    assert talking.returncode == 1
    assert [line for line in err.splitlines() if "error" in line] == err.splitlines()[-1:]
    assert "llama.cpp had to stop" in err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--rpc", "127.0.0.1:1"], 1, ["127.0.0.1:1", "rpc-server"]),
        (["--rpc", "somewhere"], 2, ["HOST:PORT"]),
        (["--rpc", "a:99999"], 2, ["HOST:PORT"]),
        (["--device", "CUDA7"], 2, ["CUDA7", "CPU"]),
        (["--device", ","], 2, ["--device"]),
        (["--device", "none", "--gpu-layers", "3"], 2, ["none"]),
    ],
)
def test_devices_that_are_not_there(kvedge, tiny, options, code, words):
    kvedge("chat", *tiny("llama").arguments(), *options, "hello").failed(code, *words)


@contextlib.contextmanager
def listening(answer):
    """Yields HOST:PORT of a false server: it calls answer(client) for every connection and closes the connection."""

    def close(client):
        with client, contextlib.suppress(OSError):  # the client may hang up first
            answer(client)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=close, args=other.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{other.getsockname()[1]}"


def test_a_port_where_something_else_listens(kvedge, tiny):
    """The false server hangs up at once."""
    with listening(lambda client: None) as address:
        kvedge("chat", *tiny("llama").arguments(), "--rpc", address, "hello", timeout=60).failed(1, "RPC server")


def test_a_server_of_another_version(kvedge, tiny):
    """The false server answers the first message with version 99."""

    def answer(client):
        if len(head := client.recv(9, socket.MSG_WAITALL)) == 9:  # a command and the length of its data
            client.recv(int.from_bytes(head[1:], "little"), socket.MSG_WAITALL)
            client.sendall((28).to_bytes(8, "little") + bytes([99]) + bytes(27))
            client.recv(1)  # until the client hangs up

    with listening(answer) as address:
        kvedge("chat", *tiny("llama").arguments(), "--rpc", address, "hello", timeout=60).failed(1, "another version")


def test_a_server_at_a_port_in_use(kvedge):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = kvedge("rpc-server", "--port", other.getsockname()[1], timeout=60)
    assert done.code == 1 and done.out == ""
    assert done.err.splitlines()[-1].startswith("kvedge: error: the server at 127.0.0.1")


def test_biases_of_merged_rows(native, talked, server, profile_file):
    """Biases are in the masks of answers: held pairs and answers equal the host's, for unequal heads, dropped rows."""
    cases = [case_of(DEMO, "lookm", SCENE, profile_file) for _ in range(3)]
    for case, more in zip(cases, ({}, {"decode": "sliding"}, {"allocator": "ada"}), strict=True):
        plan = pykvedge.plan("lookm", 0.3, reducer="averaged", **{"reducer.bias": "mass"}, **more)
        case["plan"] = plan.to_json()
    host = talked(cases)
    for settings in ({"device": "CPU"}, {"rpc": server.address}):
        there = talked(cases, **settings)
        same(host, there, cases)
        assert [case["answers"] for case in there] == [case["answers"] for case in host]
        assert all(case["device_bytes"][-1] > 0 for case in there)


def test_layers_for_a_gpu_that_is_not_there_are_said_to_stay(tiny, kvedge, monkeypatch):
    """The command prints a line, Python gives a warning. An unused package is named with its reason."""
    monkeypatch.setattr(ggml, "devices", list)
    unused = backends.Package("kvedge-vulkan", "Vulkan", problem="no GPU with a Vulkan driver")
    for packages, why in (
        ([], "`kvedge doctor` gives the reason"),
        ([unused], "kvedge-vulkan is not used: no GPU with a Vulkan"),
    ):
        monkeypatch.setattr(backends, "_found", packages)
        with pytest.warns(pykvedge.KvedgeWarning, match=f"no GPU was found for -1 gpu_layers, .*; {why}"):
            assert Offload(-1).devices() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Offload().devices() == Offload(0).devices() == Offload("auto").devices() == []
    monkeypatch.undo()
    if not any("GPU" in device.kind for device in ggml.devices()):
        done = kvedge("chat", *tiny("llama").arguments(), "--gpu-layers", -1, "--max-tokens", 1, "Hi")
        assert done.code == 0 and done.err.count("kvedge: warning: no GPU was found for -1 gpu_layers") == 1
