"""A pytest plugin for llama.cpp's server tests: it starts `kvedge serve` as their server, and records each result.

check_llama_tests.py loads it beside the tests, in an environment that has pytest and no kvedge.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import pytest
import requests

sys.modules.setdefault("wget", types.ModuleType("wget"))  # the tests import it, but only other models need it
import utils  # noqa: E402 (of llama.cpp's tests)

ABOUT = json.loads(os.environ["KVEDGE_LLAMA_TESTS"])  # python, maker, scene, results
TINY, SEEING = "ggml-org/test-model-stories260K", "ggml-org/tinygemma3-GGUF:Q8_0"
# features that kvedge decided against, by the attribute of ServerProcess that asks for them
WITHOUT = {
    "models_dir": "several models", "models_max": "several models", "models_preset": "several models",
    "no_models_autoload": "several models", "server_embeddings": "embeddings", "server_reranking": "rerank",
    "lora_files": "LoRA", "slot_save_path": "slots in files", "enable_ctx_shift": "context shift",
    "model_draft": "draft models", "spec_type": "draft models", "ui_mcp_proxy": "proxy and MCP",
    "server_tools": "tools run by the server", "mcp_servers_config": "proxy and MCP",
    "mcp_servers_json": "proxy and MCP", "gcp_compat": "Google's /predict", "sleep_idle_seconds": "sleeping",
    "backend_sampling": "sampling on the device", "model_tags": "tags", "no_ui": "no page",
}  # fmt: skip
_test_notes: dict[str, Any] = {}  # notes about the running test


class NotHereError(Exception):
    """The test needs a feature or model that kvedge does not have. kind: "model" or "option"."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


def start(server: Any, timeout_seconds: int = 60) -> None:
    """Replaces ServerProcess.start."""
    command = [ABOUT["python"], "-m", "pykvedge", "serve", "--port", "0", "--threads", "1", *options(server)]
    print("kvedge:", *command)
    server.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    utils.server_instances.add(server)
    line = server.process.stdout.readline()
    if not line:
        raise RuntimeError(f"kvedge serve ended with {server.process.wait()}")
    server.server_port = int(json.loads(line)["url"].rpartition(":")[2])
    server.ready = True


def options(server: Any) -> list[str]:
    """Returns the options of a server, as options of kvedge. Raises NotHereError."""
    for name, what in WITHOUT.items():
        if getattr(server, name):
            raise NotHereError("option", what)
    if "," in server.server_host or "," in (server.model_alias or ""):
        raise NotHereError("option", "several addresses or names")
    slots = server.n_slots or 4
    out = [*model(server), "--host", server.server_host, "--parallel", slots, "--temp", server.temperature]
    out += ["--seed", server.seed, "--memory", "256MiB"]
    if server.n_ctx:  # the context of llama-server is shared by all slots
        out += ["--ctx", server.n_ctx if server.kv_unified else server.n_ctx // slots]
    if (server.n_predict or -1) > 0:
        out += ["--max-tokens", server.n_predict]
    if server.model_alias:
        out += ["--name", server.model_alias]
    if server.media_path:
        out += ["--image-folder", Path(server.media_path).resolve()]
    for origin in (server.cors_origins or "*").split(","):  # llama-server allows pages of all origins
        out += ["--allow-origin", origin]
    if server.api_key:
        key = Path(ABOUT["results"], f"key-{os.getpid()}")
        key.write_text(server.api_key)
        out += ["--key-file", key]
    return list(map(str, out))


def model(server: Any) -> list[Any]:
    """Returns the options of the model that replaces the named one. Raises NotHereError."""
    if server.model_hf_repo == SEEING:
        return ["--allow-https-images"]  # uses the packaged model
    if server.model_hf_repo not in (TINY, None) or server.model_hf_file or server.model_url:
        raise NotHereError("model", server.model_hf_repo)
    if server.model_hf_repo is None and "test_security" not in _test_notes["test"]:
        raise NotHereError("option", "several models")
    template = server.chat_template or ""
    if server.chat_template_file:
        template = Path(server.chat_template_file).read_text(encoding="utf-8")
    elif template not in ("", "chatml") and "{" not in template and " " not in template:
        raise NotHereError("option", "chat templates by name")
    path = Path(ABOUT["results"], f"model-{zlib.crc32(template.encode())}-{os.getpid()}.gguf")
    if not path.exists():
        make = [ABOUT["python"], ABOUT["maker"], "--make", path]
        subprocess.run(make, input=template, text=True, check=True)
    return ["--model", path, "--mmproj", "none"]


def picture(url: str, **options: Any) -> Any:
    """Replaces requests.get where a test fetches a picture from the hub: returns a scene."""
    if not re.match("https://[^/]+/ggml-org/.*png$", url):
        return _get(url, **options)
    answer = requests.Response()
    answer.status_code, answer._content = 200, base64.b64decode(ABOUT["scene"])
    return answer


_get, requests.get = requests.get, picture
_request = utils.ServerProcess.make_request


def make_request(server: Any, method: str, path: str, *rest: Any, **more: Any) -> Any:
    """Replaces ServerProcess.make_request. `--reasoning off` becomes a field of the request. Notes unknown routes."""
    given = more.get("data", rest[0] if rest else None)
    if server.reasoning == "off" and isinstance(given, dict):
        given["chat_template_kwargs"] = {"enable_thinking": False}
    answer = _request(server, method, path, *rest, **more)
    answer.headers = requests.structures.CaseInsensitiveDict(answer.headers)
    if answer.status_code in (404, 405):
        _test_notes["route"] = path.partition("?")[0]
    return answer


def match_regex(regex: str, text: str) -> bool:
    """Replaces the tests' match_regex: notes a mismatch, because the model is another one, and returns True."""
    if not _match(regex, text):
        _test_notes["words"] = f"{regex} in {text!r:.80}"
    return True


class Length(int):
    """The expected number of tokens: equals every number, but notes a different one, because the model differs."""

    def __eq__(self, other: object) -> bool:
        if int(self) != other:
            _test_notes["words"] = f"{int(self)} tokens, not {other}"
        return True

    __hash__ = int.__hash__


_match, utils.match_regex = utils.match_regex, match_regex
utils.ServerProcess.start, utils.ServerProcess.make_request = start, make_request
utils.ServerPreset.load_all = staticmethod(lambda: None)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    """Clears the notes before a test."""
    _test_notes.clear()
    _test_notes["test"] = item.nodeid
    yield


def pytest_runtest_call(item: Any) -> None:
    """Accepts prompts of any length."""
    for name in {"n_prompt"} & item.funcargs.keys():
        item.funcargs[name] = Length(item.funcargs[name])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Records the result of a test."""
    report = (yield).get_result()
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    noted = {"test": item.nodeid, "outcome": report.outcome, "words": _test_notes.get("words")}
    if call.excinfo is not None and report.failed:
        error = call.excinfo.value
        own = [e for e in call.excinfo.traceback if "/unit/" in str(e.path)] or list(call.excinfo.traceback)
        text = " ".join(line.strip() for line in str(own[-1].statement).splitlines())
        error_text = f"{type(error).__name__}: {error}"[:600]
        noted |= {"line": text[:300], "error": error_text, "route": _test_notes.get("route")}
        if isinstance(error, NotHereError):
            noted |= {"kind": error.kind, "what": error.what}
    with Path(ABOUT["results"], f"{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps(noted), file=file)
