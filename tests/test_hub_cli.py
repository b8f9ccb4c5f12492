"""Runs -hf, run, pull, list and rm beside a local hub."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import QUICK_BENCH
from hubs import HEADERS, MMPROJ, MODEL, REPO, Place, environment, fill
from hubserver import HubServer

from pykvedge import KvedgeError
from pykvedge.cli.program import cli


@pytest.fixture(scope="module")
def server(tiny):
    with HubServer() as hub:
        fill(hub, tiny("llava"))
        yield hub


@pytest.fixture(scope="module")
def filled(server, kvedge, tmp_path_factory):
    """A cache that `chat -hf` has filled, and the program's output."""
    place = Place(server, tmp_path_factory.mktemp("hf"), {})
    place.env.update(environment(server, place.home))
    done = kvedge("chat", "-hf", REPO, "--threads", 1, "--max-tokens", 8, "Hello?", env=place.env)
    return place, done


@pytest.fixture
def fresh(server, tiny, tmp_path):
    server.forget()
    fill(server, tiny("llava"))
    return Place(server, tmp_path, environment(server, tmp_path))


def offline(place):
    return {**place.env, "HF_ENDPOINT": "http://127.0.0.1:9"}


def test_the_answer_is_that_of_the_files(kvedge, tiny, filled, picture_file):
    place, first = filled
    asked = ["--max-tokens", 8, "--threads", 1]
    assert first.code == 0, first
    lines = [line for line in first.err.splitlines() if line.startswith("downloading ")]
    assert [line.split(":")[0] for line in lines] == [f"downloading {MMPROJ}", f"downloading {MODEL}"]
    assert kvedge("chat", *tiny("llava").arguments(), *asked, "Hello?").out == first.out
    seen = ["--image", picture_file(), "What is this?"]
    by_name = kvedge("chat", "-hf", f"{REPO}:Q4_K_M", "--offline", *asked, *seen, env=offline(place))
    by_file = kvedge("chat", *tiny("llava").arguments(), *asked, *seen)
    assert by_name.code == 0 and by_name.out == by_file.out and "downloading" not in by_name.err


def test_fit_reads_headers_alone(kvedge, tiny, fresh):
    own = tiny("llava")
    done = kvedge("fit", "-hf", REPO, "--json", env=fresh.env)
    assert done.code == 0 and fresh.hub.bytes_sent == HEADERS and not fresh.folder.exists()
    files = kvedge("fit", own.model, "--mmproj", own.mmproj, "--json")
    assert done.json["model"] == f"{REPO}/{MODEL}" and done.json["mmproj"] == f"{REPO}/{MMPROJ}"
    for key in ("weights", "encoder", "kv_prompt", "kv_kept"):
        assert done.json["bytes"][key] == files.json["bytes"][key]


def refused(place, *arguments):
    """Returns the error that ends a command, run in this process."""
    done = CliRunner().invoke(cli, list(map(str, arguments)), env=place.env)
    assert done.exit_code != 0 and isinstance(done.exception, KvedgeError) and done.stdout == "", (arguments, done)
    return done.exception


COMMANDS = (["bench", "--quick"], ["eval"], ["inspect", "--no-figures"], ["fit"], ["calibrate", "heads"],
            ["calibrate", "prefix"])  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_takes_a_model_takes_a_name(native, fresh, command):
    assert "has no repository tiny/nothing" in str(refused(fresh, *command, "-hf", "tiny/nothing"))
    assert fresh.asked() == [("GET", "/api/models/tiny/nothing/revision/main", None)]


def test_bench_takes_several_names(kvedge, filled):
    place, _ = filled
    run = ["--quick", "--images", 0, "--method", "h2o", "--tokens", 16, "--generate", 2, "--repeat", 1, "--json"]
    done = kvedge("bench", "-hf", REPO, "--offline", *run, env=offline(place), script=QUICK_BENCH)
    assert done.code == 0, done
    assert MODEL.removesuffix(".gguf") in done.out


def test_bad_requests_are_refused(native, fresh, tiny):
    model = tiny("llava").model
    for code, arguments, words in (
        (2, ["-hf", "../x"], "is not the name of a model"),
        (2, ["-hf", f"{REPO}:Q9"], "available: Q4_K_M"),
        (2, ["-hf", REPO, "--model", model], "--model and -hf"),
        (2, ["-hf", REPO, "--mmproj", model, "--hf-mmproj", MMPROJ], "--mmproj and --hf-mmproj"),
        (2, ["--offline"], "--offline needs -hf"),
        (2, ["--model", model, "--hf-file", MODEL], "--hf-file needs -hf"),
        (1, ["-hf", REPO, "--offline"], "is not in the cache"),
        (1, ["-hf", "tiny/nothing"], "has no repository tiny/nothing"),
    ):
        error = refused(fresh, "chat", *arguments, "Hello?")
        assert error.exit_code == code and words in str(error)
    assert fresh.hub.bytes_sent == 0


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "http://[::1", "http://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_is_named(kvedge, fresh, filled, proxy):
    """The cache is used instead, as if the hub did not answer."""
    named = {"all_proxy": proxy, "NO_PROXY": "", "no_proxy": ""}
    failed = kvedge("pull", REPO, env=fresh.env | named)
    failed.failed(1, "cannot be", "check the proxy in all_proxy")
    assert "unexpected" not in failed.err
    there, done = filled
    again = kvedge("chat", "-hf", REPO, "--threads", 1, "--max-tokens", 8, "Hello?", env=there.env | named)
    assert again.out == done.out and "using the model in the cache" in again.err


@pytest.mark.parametrize("endpoint", ["http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:port", "http://"])
def test_an_endpoint_that_is_none(kvedge, fresh, endpoint):
    kvedge("pull", REPO, env=fresh.env | {"HF_ENDPOINT": endpoint}).failed(2, "HF_ENDPOINT must be the URL of a hub")


def test_what_goes_wrong_is_one_line(kvedge, fresh):
    kvedge("chat", "-hf", f"{REPO}:Q9", "Hello?", env=fresh.env).failed(2, "unknown quantisation", "Q4_K_M")
    kvedge("chat", "-hf", REPO, "Hello?", env=offline(fresh)).failed(1, "cannot be reached", "; check the network")
    kvedge("chat", "-hf", REPO, "--json", env=fresh.env).failed(2, "the prompt is empty")
    assert fresh.hub.bytes_sent == 0


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is another matter elsewhere")
def test_ctrl_c_ends_a_download_and_keeps_what_has_come(fresh, environment):
    fresh.hub.faults.hold = threading.Event()
    command = [sys.executable, "-m", "pykvedge", "chat", "-hf", REPO, "--hf-mmproj", "none", "Hello?"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment, **fresh.env},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background tests inherit SIG_IGN
    )  # fmt: skip
    assert fresh.hub.halfway.wait(60)
    for _ in range(6):  # Python sees a SIGINT just before a blocking read only after the read, so press again
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = child.communicate(timeout=10)
            break
    fresh.hub.faults.hold.set()
    assert child.returncode == 130 and out == ""
    assert len(err.strip().splitlines()) == 1 and err.startswith(f"downloading {MODEL}: ")
    (begun,) = fresh.blobs()
    assert begun.endswith(".incomplete")


def test_without_the_extra_it_says_what_to_install(kvedge, environment, fresh, tmp_path):
    """A module that cannot be imported replaces a missing package."""
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('no module')\n")
    env = {**fresh.env, "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    kvedge("chat", "-hf", REPO, "Hello?", env=env).failed(2, "pip install 'kvedge[hub]'")
    assert kvedge("list", "--json", env=env).json["models"] == []


def test_an_encoder_of_ones_own_comes_in_the_place_of_the_repositorys(kvedge, tiny, fresh, picture_file):
    own = tiny("llava").mmproj
    arguments = ["--image", picture_file(), "--threads", 1, "--max-tokens", 4, "--json", "What?"]
    done = kvedge("chat", "-hf", REPO, "--mmproj", own, *arguments, env=fresh.env)
    assert done.code == 0 and done.json["tokens"]["image"] == 16
    assert MMPROJ not in fresh.hub.sent and fresh.hub.sent[MODEL] > 0
    blind = kvedge("chat", "-hf", REPO, "--hf-mmproj", "none", "--offline", *arguments, env=fresh.env)
    blind.failed(2, "--image needs the image encoder")


def test_models_are_pulled_listed_run_and_removed(kvedge, native, fresh):
    def run(*arguments):
        done = CliRunner().invoke(cli, arguments, env=fresh.env)
        assert done.exit_code == 0, done
        return done

    empty = run("list")
    assert empty.stdout == "" and "no models in" in empty.stderr
    files = run("pull", REPO, "--quiet").stdout.split()
    assert [Path(path).name for path in files] == [MODEL, MMPROJ] and all(Path(path).is_file() for path in files)
    listed = json.loads(run("list", "--json").stdout)
    (model,) = listed["models"]
    sizes = [len(fresh.hub.repos[REPO][path].data) for path in (MODEL, MMPROJ)]
    assert (model["name"], model["file"], model["mmproj"]) == (f"{REPO}:Q4_K_M", MODEL, MMPROJ)
    assert [model["bytes"], model["mmproj_bytes"]] == sizes and listed["unfinished"] == {}
    assert f"| {REPO}:Q4_K_M | 3.3 MiB" in run("list").stdout and run("models").stdout == run("list").stdout
    assert max(map(len, run("list").stdout.splitlines())) <= 80
    asked = ["--threads", 1, "--max-tokens", 4, "--quiet", "Hello?"]
    sent = fresh.hub.bytes_sent
    by_run = kvedge("run", f"{REPO}:Q4_K_M", *asked, env=fresh.env)
    assert by_run.code == 0 and fresh.hub.bytes_sent == sent
    for same in (["-hf", REPO], ["--model", REPO], ["--model", files[0], "--mmproj", files[1]]):
        assert kvedge("chat", *same, *asked, env=fresh.env).out == by_run.out
    assert "pass --yes" in str(refused(fresh, "rm", REPO))
    assert "unknown quantisation" in str(refused(fresh, "rm", f"{REPO}:Q8_0", "--yes"))
    assert len(fresh.blobs()) == 2
    gone = json.loads(run("rm", f"{REPO}:Q4_K_M", "--yes", "--json").stdout)
    assert gone == {"name": f"{REPO}:Q4_K_M", "files": sorted([MODEL, MMPROJ]), "bytes": sum(sizes)}
    assert fresh.blobs() == set()
    (fresh.folder / "blobs" / ("a" * 64 + ".incomplete")).write_bytes(b"begun")
    assert f"{REPO}: the download stopped after" in run("list").stderr
    assert "removed" in run("rm", REPO, "--yes").stdout and not fresh.folder.exists()


@pytest.mark.parametrize("name", [MODEL, MMPROJ])
def test_a_file_that_is_not_whole_is_not_listed_as_a_model(kvedge, filled, name):
    there, _ = filled
    (place,) = there.folder.glob(f"snapshots/*/{name}")
    blob, data = place.resolve(), place.read_bytes()
    blob.write_bytes(data[: len(data) // 2])
    try:
        listed = kvedge("list", "--json", env=there.env)
        assert listed.json["models"] == [] and f"{name} is damaged or truncated" in listed.err
    finally:
        blob.write_bytes(data)
    assert [one["file"] for one in kvedge("list", "--json", env=there.env).json["models"]] == [MODEL]


def test_removing_asks_at_a_terminal(kvedge, native, fresh, monkeypatch):
    from pykvedge.cli import models

    (fresh.folder / "blobs").mkdir(parents=True)
    runner = CliRunner()
    monkeypatch.setattr(models, "_at_terminal", lambda: True)
    no = runner.invoke(cli, ["rm", REPO], env=fresh.env, input="n\n")
    assert no.exit_code == 1 and no.stdout == "" and "nothing was removed" in no.stderr and fresh.folder.exists()
    yes = runner.invoke(cli, ["rm", REPO], env=fresh.env, input="y\n")
    assert yes.exit_code == 0 and not fresh.folder.exists()
