"""Stored settings: options come before the environment, then the file, then defaults."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import pykvedge
from pykvedge.cli import configured
from pykvedge.cli.program import cli
from pykvedge.errors import KvedgeError, ProfileError, SaveError
from pykvedge.models import profiles, tuned
from pykvedge.system.files import DATA

MODEL, MMPROJ = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments) -> the result of the program in this process, with a separate configuration."""
    monkeypatch.setenv("KVEDGE_CONFIG", str(tmp_path / "config.toml"))
    return lambda *arguments: CliRunner().invoke(cli, [str(one) for one in arguments])


def refused(run, *arguments):
    done = run(*arguments)
    assert done.exit_code != 0 and isinstance(done.exception, KvedgeError), done
    return str(done.exception)


def fit(run, *arguments):
    done = run("fit", "--json", *arguments)
    assert done.exit_code == 0, done
    return json.loads(done.stdout)


def test_the_nearest_to_the_user_wins(run, monkeypatch):
    def found(*options):
        shown = fit(run, *options)
        return shown["method"], shown["budget"]

    assert found() == ("kvedge", 0.5)
    run("config", "set", "method", "lookm")
    run("config", "set", "budget", "0.3")
    assert found() == ("lookm", 0.3)
    monkeypatch.setenv("KVEDGE_METHOD", "h2o")
    assert found() == ("h2o", 0.3)
    assert found("--method", "snapkv", "--budget", "64") == ("snapkv", 64)
    assert found("--method", "full") == ("full", 1.0)  # full has no budget
    shown = json.loads(run("config", "--json").stdout)["settings"]
    assert shown["method"] == {"value": "h2o", "from": "KVEDGE_METHOD"}
    assert shown["budget"]["from"] == os.environ["KVEDGE_CONFIG"]
    run("config", "unset", "budget")
    assert found() == ("h2o", 0.2)


def test_a_model_of_the_configuration_is_named_and_replaced_with_its_encoder(run, tiny, tmp_path, kvedge, monkeypatch):
    llama = tiny("llama").model
    monkeypatch.chdir(DATA)
    assert run("config", "set", "model", MODEL.name).exit_code == 0
    assert run("config", "set", "mmproj", MMPROJ.name).exit_code == 0
    shown = fit(run)
    assert (shown["model"], shown["mmproj"]) == (str(MODEL), str(MMPROJ))
    for other in (["--model", llama], [llama]):
        shown = fit(run, *other)
        assert (shown["model"], shown["mmproj"]) == (str(llama), None)
    monkeypatch.setenv("KVEDGE_MODEL", str(llama))
    assert fit(run)["mmproj"] is None
    monkeypatch.delenv("KVEDGE_MODEL")
    done = kvedge("chat", "--max-tokens", 2, "What?", env={"KVEDGE_CONFIG": str(tmp_path / "config.toml")})
    assert done.code == 0 and done.err.startswith(f"kvedge: model {MODEL}, from {tmp_path / 'config.toml'}\n")


def test_variables_that_nothing_reads_are_named(kvedge):
    done = kvedge("chat", "--max-tokens", 1, "Hi", env={"KVEDGE_BUDGTE": "0.1", "KVEDGE_TEMPERATURE": "1"})
    warned = [line for line in done.err.splitlines() if "warning" in line]
    assert warned == [
        "kvedge: warning: the environment variable KVEDGE_BUDGTE is not a setting of kvedge; did you mean "
        "KVEDGE_BUDGET?",
        "kvedge: warning: the environment variable KVEDGE_TEMPERATURE is not a setting of kvedge; `kvedge config` "
        "lists the settings",
    ]
    assert "warning" not in kvedge("chat", "-q", "--max-tokens", 1, "Hi", env={"KVEDGE_BUDGTE": "0.1"}).err
    assert "warning" not in kvedge("chat", "--max-tokens", 1, "Hi", env={"KVEDGE_BUDGET": "0.1"}).err


def test_a_conversation_in_a_file_keeps_its_own_method(kvedge, tiny, tmp_path):
    env = {"KVEDGE_CONFIG": str(tmp_path / "config.toml")}
    asked = ["chat", *tiny("llama").arguments(), "--session", tmp_path / "talk.kvs", "--max-tokens", 2, "--json"]
    assert kvedge(*asked, "--method", "h2o", "--budget", "0.4", "Hello", env=env).json["method"] == "h2o"
    assert kvedge("config", "set", "method", "lookm", env=env).code == 0
    later = kvedge(*asked, "And now?", env=env)
    assert (later.json["method"], later.json["budget"]) == ("h2o", 0.4)
    with_budget = kvedge(*asked, "--budget", "0.5", "--sinks", 2, "Why?", env=env)
    assert (with_budget.json["method"], with_budget.json["budget"]) == ("h2o", 0.5)
    assert kvedge(*asked, "--method", "snapkv", "And now?", env=env).json["method"] == "snapkv"


def test_configured_whole_rows_give_way_to_what_they_exclude(kvedge, tiny, tmp_path):
    env = {"KVEDGE_CONFIG": str(tmp_path / "config.toml"), "KVEDGE_KEEP": "disk", "KVEDGE_KEEP_FOLDER": str(tmp_path)}
    asked = ["chat", *tiny("llama").arguments(), "--max-tokens", 2, "--json", "Hello"]
    assert kvedge(*asked, env=env).json["kv"]["whole_bytes"] > 0
    for other in (["--stream", "--budget", 64], ["--bounded"], ["--question-blind"], ["--keep", "ram"]):
        assert kvedge(*asked, *other, env=env).code == 0


def test_a_stream_in_a_file_goes_on_without_its_budget(kvedge, tiny, tmp_path):
    asked = ["chat", *tiny("llama").arguments(), "--stream", "--session", tmp_path / "talk.kvs", "--max-tokens", 2]
    assert kvedge(*asked, "--method", "snapkv", "--budget", 64, "Hello").code == 0
    later = kvedge(*asked, "And now?", "--json")
    assert (later.json["method"], later.json["budget"]) == ("snapkv", 64)


def test_wrong_keys_and_values_are_one_clear_line(run, tmp_path, monkeypatch):
    file = tmp_path / "config.toml"
    for key, value, words in (
        ("modle", "x", "unknown key 'modle'; did you mean 'model'?"),
        ("method", "lokm", "unknown method 'lokm'; did you mean 'lookm'?"),
        ("threads", "0", "--threads must be at least 1"),
        ("budget", "3.5", "above 0 and at most 1.0"),
        ("kv-type", "q9", "unknown kv_type 'q9'"),
        ("model", "nowhere.gguf", "nowhere.gguf does not exist"),
        ("memory", "much", "memory takes a number of bytes"),
        ("top-p", "2", "top_p"),
    ):
        assert words in refused(run, "config", "set", key, value)
    assert "'--threads'" in run("config", "set", "threads", "many").stderr
    assert not file.exists()
    for text, words in (
        ("modle = 1", "unknown key 'modle'"),
        ("[model]\na = 1", "model in"),
        ("method = ", "is not TOML"),
        ('method = "lokm"', f"did you mean 'lookm'? (method = lokm, from {file})"),
        ('threads = "many"', f"(threads = many, from {file})"),
    ):
        file.write_text(text + "\n")
        assert words in refused(run, "fit")
    file.write_text('threads = 1\nmodel = "nowhere.gguf"\n')
    assert refused(run, "fit") == f"nowhere.gguf does not exist (model = nowhere.gguf, from {file})"
    assert "from" not in refused(run, "fit", MODEL, "--image-size", "1")  # this 1 is not the 1 of threads
    file.unlink()
    monkeypatch.setenv("KVEDGE_CTX", "-5")
    assert "--ctx must be at least 1, not -5 (ctx = -5, from KVEDGE_CTX)" in refused(run, "fit")


def test_set_and_unset_change_their_line_alone(run, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('# mine\nmethod = "h2o"  # good\n\nsystem = """\nmethod = "x" """\n')
    assert "kvedge cannot change system" in refused(run, "config", "set", "system", "Be brief.")
    file.write_text('# mine\nmethod = "h2o"\n\nthreads = 2 # few\n')
    run("config", "set", "threads", "4")
    run("config", "set", "system", 'Say "oui" \\ ü')
    assert file.read_text() == '# mine\nmethod = "h2o"\n\nthreads = 4\nsystem = "Say \\"oui\\" \\\\ ü"\n'
    assert json.loads(run("config", "show", "--json").stdout)["settings"]["system"]["value"] == 'Say "oui" \\ ü'
    run("config", "unset", "method")
    assert file.read_text().startswith("# mine\n\nthreads = 4\n")
    assert "gpu-layers is not set" in refused(run, "config", "unset", "gpu-layers")


def test_commands_that_measure_heed_places_alone(run, tmp_path, tiny):
    """A stored method, budget or storage type must not change published measurements."""
    from pykvedge.cli import configured

    root = configured.all_keys(cli)
    takers = {key: {command.name for command, _ in pairs} for key, pairs in root.items()}
    measuring = {"bench", "eval", "inspect", "heads", "prefix", "budgets"}
    assert {key for key, names in takers.items() if names & measuring} == set(configured.PLACES)
    assert measuring <= takers["model"] and {"chat", "run", "serve", "fit"} <= takers["kv-type"]
    run("config", "set", "model", tiny("llama").model)
    run("config", "set", "kv-type", "q8_0")
    done = run("bench", "--images", 1)
    assert "prompts with images need --mmproj" in str(done.exception)  # the model of the configuration has no encoder


def test_the_file_lies_where_the_system_has_such_files(run, monkeypatch, tmp_path):
    monkeypatch.delenv("KVEDGE_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    places = {"linux": ".config", "darwin": "Library/Application Support"}
    for platform, place in places.items():
        monkeypatch.setattr("sys.platform", platform)
        assert Path(run("config", "path").stdout.strip()) == tmp_path / place / "kvedge" / "config.toml"
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "x"))
    assert run("config", "path").stdout == f"{tmp_path}/x/kvedge/config.toml\n"


@pytest.mark.skipif(os.name != "posix", reason="folders that nobody may enter")
def test_a_home_that_may_not_be_entered_holds_nothing(monkeypatch, tmp_path):
    """As in a container whose user may not enter HOME."""
    for name in ("KVEDGE_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiles, "hash_of", lambda model: "sampled-sha256:" + "0" * 64)
    (tmp_path / "home").mkdir(mode=0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may enter everything
    try:
        with pytest.raises(PermissionError):
            (tmp_path / "home" / ".config").stat()
        assert configured.stored() == {} and tuned.find("model.gguf") is None
        with pytest.raises(ProfileError, match="kvedge calibrate"):
            profiles.find(pykvedge.plan("calibrated"), "model.gguf")
        done = CliRunner().invoke(cli, ["config", "set", "budget", "0.2"])
        assert isinstance(done.exception, SaveError)
    finally:
        os.seteuid(user)
