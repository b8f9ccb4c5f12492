"""A pytest plugin for llama.cpp's server tests: their servers are `kvedge serve`, and each result is written down.

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

sys.modules.setdefault("wget", types.ModuleType("wget"))  # which they import, and need for other models alone
import utils  # noqa: E402 (of llama.cpp's tests)

ABOUT = json.loads(os.environ["KVEDGE_LLAMA_TESTS"])  # python, models, scene, template, results
TINY, SEEING = "ggml-org/test-model-stories260K", "ggml-org/tinygemma3-GGUF:Q8_0"
# what kvedge decided against, by the attribute of ServerProcess that asks for it
WITHOUT = {
    "models_dir": "several models", "models_max": "several models", "models_preset": "several models",
    "no_models_autoload": "several models", "server_embeddings": "embeddings", "server_reranking": "rerank",
    "lora_files": "LoRA", "slot_save_path": "slots in files", "enable_ctx_shift": "context shift",
    "model_draft": "draft models", "spec_type": "draft models", "ui_mcp_proxy": "proxy and MCP",
    "server_tools": "tools run by the server", "mcp_servers_config": "proxy and MCP",
    "mcp_servers_json": "proxy and MCP", "gcp_compat": "Google's /predict", "sleep_idle_seconds": "sleeping",
    "backend_sampling": "sampling on the device", "model_tags": "tags", "no_ui": "no page",
}  # fmt: skip
_there: dict[str, Any] = {}  # of the running test


class NotHereError(Exception):
    """The test asks for what kvedge does not have. kind: "model" or "option"."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


def start(server: Any, timeout_seconds: int = 60) -> None:
    """Stands for ServerProcess.start."""
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
    """Writes the options of a server as kvedge's. Raises NotHereError."""
    for name, what in WITHOUT.items():
        if getattr(server, name):
            raise NotHereError("option", what)
    if "," in server.server_host or "," in (server.model_alias or ""):
        raise NotHereError("option", "several addresses or names")
    slots = server.n_slots or 4
    out = [*model(server), "--host", server.server_host, "--parallel", slots, "--temp", server.temperature]
    out += ["--seed", server.seed, "--memory", "256MiB"]
    if server.n_ctx:  # llama-server's is for all slots together
        out += ["--ctx", server.n_ctx if server.kv_unified else server.n_ctx // slots]
    if (server.n_predict or -1) > 0:
        out += ["--max-tokens", server.n_predict]
    if server.model_alias:
        out += ["--name", server.model_alias]
    if server.media_path:
        out += ["--image-folder", Path(server.media_path).resolve()]
    for origin in (server.cors_origins or "*").split(","):  # llama-server lets pages of all origins ask
        out += ["--allow-origin", origin]
    if server.api_key:
        key = Path(ABOUT["results"], f"key-{os.getpid()}")
        key.write_text(server.api_key)
        out += ["--key-file", key]
    return list(map(str, out))


def model(server: Any) -> list[Any]:
    """Chooses the model that stands for the one that is named. Raises NotHereError."""
    if server.model_hf_repo == SEEING:
        return ["--allow-https-images"]  # and the packaged model
    if server.model_hf_repo not in (TINY, None) or server.model_hf_file or server.model_url:
        raise NotHereError("model", server.model_hf_repo)
    if server.model_hf_repo is None and "test_security" not in _there["test"]:
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
    """Stands for requests.get where a test fetches a picture from the hub: a scene."""
    if not re.match("https://[^/]+/ggml-org/.*png$", url):
        return _get(url, **options)
    answer = requests.Response()
    answer.status_code, answer._content = 200, base64.b64decode(ABOUT["scene"])
    return answer


_get, requests.get = requests.get, picture
_request = utils.ServerProcess.make_request


def make_request(server: Any, method: str, path: str, *rest: Any, **more: Any) -> Any:
    """Stands for ServerProcess.make_request: `--reasoning off` is a field of requests here. Notes unknown routes."""
    given = more.get("data", rest[0] if rest else None)
    if server.reasoning == "off" and isinstance(given, dict):
        given["chat_template_kwargs"] = {"enable_thinking": False}
    answer = _request(server, method, path, *rest, **more)
    answer.headers = requests.structures.CaseInsensitiveDict(answer.headers)
    if answer.status_code in (404, 405):
        _there["route"] = path.partition("?")[0]
    return answer


def match_regex(regex: str, text: str) -> bool:
    """Stands for the tests' own: other words than the named model's are noted, and the test goes on."""
    if not _match(regex, text):
        _there["words"] = f"{regex} in {text!r:.80}"
    return True


class Length(int):
    """A number of tokens by the named model's vocabulary: another one is noted, and the test goes on."""

    def __eq__(self, other: object) -> bool:
        if int(self) != other:
            _there["words"] = f"{int(self)} tokens, not {other}"
        return True

    __hash__ = int.__hash__


_match, utils.match_regex = utils.match_regex, match_regex
utils.ServerProcess.start, utils.ServerProcess.make_request = start, make_request
utils.ServerPreset.load_all = staticmethod(lambda: None)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    """Begins the notes of a test."""
    _there.clear()
    _there["test"] = item.nodeid
    yield


def pytest_runtest_call(item: Any) -> None:
    """Makes prompts of any length right."""
    for name in {"n_prompt"} & item.funcargs.keys():
        item.funcargs[name] = Length(item.funcargs[name])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Writes down how a test ended."""
    report = (yield).get_result()
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    noted = {"test": item.nodeid, "outcome": report.outcome, "words": _there.get("words")}
    if call.excinfo is not None and report.failed:
        error = call.excinfo.value
        own = [e for e in call.excinfo.traceback if "/unit/" in str(e.path)] or list(call.excinfo.traceback)
        text = " ".join(line.strip() for line in str(own[-1].statement).splitlines())
        noted |= {"line": text[:300], "error": f"{type(error).__name__}: {error}"[:600], "route": _there.get("route")}
        if isinstance(error, NotHereError):
            noted |= {"kind": error.kind, "what": error.what}
    with Path(ABOUT["results"], f"{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps(noted), file=file)
