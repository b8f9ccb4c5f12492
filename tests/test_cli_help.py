"""Help texts fit a terminal and show every option. llama.cpp's short options have llama.cpp's meaning."""

import re

import click
import pytest
from click.testing import CliRunner

from pykvedge.cli.program import cli

GROUPS = ["Model", "Picture", "What is kept", "Answer", "Sampling", "Memory and devices", "Output"]


def commands(group=cli, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        yield (*path, name), command


def shown(*arguments):
    done = CliRunner().invoke(cli, arguments, terminal_width=None)
    assert done.exit_code == 0, done
    return done.stdout


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_help_fits_80_columns_and_help_all_has_every_option(path, command):
    few = shown(*path, "--help")
    long = "--help-all" in few
    every = shown(*path, "--help-all") if long else few
    assert max(map(len, (few + every).splitlines())) <= 80
    names = [name for param in command.params if isinstance(param, click.Option) for name in param.opts]
    assert [name for name in names if name not in every.replace(",", " ").replace("/", " ").split()] == []
    if long:
        assert len(few) < len(every)


def test_the_help_of_chat_shows_in_groups_what_people_need():
    few, every = shown("chat", "--help"), shown("chat", "--help-all")
    for text in (few, every):
        assert [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and line[0] != " "] == GROUPS
    options = [line for line in few.splitlines() if line.startswith("  -")]
    assert 12 <= len(options) <= 20
    for name in ("--model", "-hf", "--image", "--method", "--budget", "--max-tokens", "--temp", "--threads", "--json"):
        assert any(name in line for line in options), name
    assert "--critical-half" in every and "--critical-half" not in few
    assert "--n-gpu-layers" in every and "--n-gpu-layers" not in few


def test_letters_of_llama_cpp_mean_the_same(kvedge, tiny):
    files = tiny("llama")
    words = ["chat", "--json", "--seed", 3, "--temp", 1, "--max-tokens", 5, "--ctx", 300, "--threads", 1, "--model"]
    letters = ["chat", "--json", "-s", 3, "--temperature", 1, "-n5", "-c", 300, "-t", 1, "-ngl", 0, "-v", "-m"]
    long = kvedge(*words, files.model, "--system", "Be brief.", "Hello")
    short = kvedge(*letters, files.model, "-sys", "Be brief.", "-p", "Hello")
    assert long.code == short.code == 0
    assert long.json["text"] == short.json["text"] and short.json["tokens"]["generated"] <= 5
    assert "llama_model_loader" in short.err
    kvedge(*letters, files.model, "-p", "Hello", "Hello").failed(2, "PROMPT and --prompt")
    kvedge("chat", "-m", files.model, "-t", 0, "Hello").failed(2, "--threads must be at least 1")
    kvedge("chat", "-m", files.model, "-n", "many", "Hello").failed(2, "'--max-tokens'")


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_help_names_only_options_of_its_command(path, command):
    params = command.get_params(click.Context(command))
    own = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    for option in (param for param in command.params if isinstance(param, click.Option)):
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"`[^`]*`", "", option.help or ""))
        assert set(named) <= own, (option.name, named)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-ctk", "q8_0", "Hi"], "No such option '-ctk'. Did you mean '--kv-type'?"),
        (["--cache-type-v=q8_0", "Hi"], "No such option '--cache-type-v'. Did you mean '--kv-type'?"),
        (["-fa", "on", "Hi"], "No such option '-fa' ("),
        (["-ngl99", "Hi"], "No such option '-ngl99' ("),
        (["-qv", "-c", "4k", "Hi"], "'4k' is not a valid integer"),
        (["scene.png", "What is this?"], "PROMPT must be one argument"),
        (["--image", "https://example.org/a.jpg", "Hi"], "https://example.org/a.jpg is an address on the web"),
        (["-m", "http://example.org/m.gguf", "Hi"], "http://example.org/m.gguf is an address on the web"),
        (["--exact", "Hi"], "--exact needs --keep: add --keep"),
        (["--pruner", "grid", "Hi"], "(--image-tokens)"),
    ],
)
def test_habits_from_other_programs_get_an_answer_that_helps(kvedge, arguments, said):
    kvedge("chat", *arguments).failed(2, said)


def test_a_name_of_ollama_gets_the_form_of_names_here(kvedge):
    for asked in (["run", "llava:7b", "Hi"], ["chat", "-m", "llava", "Hi"], ["fit", "llava:7b"]):
        kvedge(*asked).failed(1, "does not exist; give a GGUF file, or a name of a model hub such as USER/REPO:Q4_K_M")
    kvedge("chat", "-m", "nowhere.gguf", "Hi").failed(1, "nowhere.gguf does not exist")


def test_a_picture_that_a_question_only_names_is_pointed_out(kvedge, tiny, picture_file):
    path, asked = picture_file(), ["chat", *tiny("llava").arguments(), "--max-tokens", 1]
    said = f"kvedge: the model does not see {path}, a name in the text; add --image {path}\n"
    assert said in kvedge(*asked, f"What is this? {path}").err
    for unsaid in (["--quiet", f"What is {path}?"], ["--image", path, f"What is {path}?"], ["What is a.png?"]):
        assert "does not see" not in kvedge(*asked, *unsaid).err
