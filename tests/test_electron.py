"""examples/electron without Electron: Node runs the requests of its main process, Chromium its page."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from waits import until

EXAMPLE = ROOT / "examples" / "electron"
SCENE = ROOT / "examples" / "scene-1.png"
NODE, PROGRAM = shutil.which("node"), Path(sys.executable).with_name("kvedge")
ASK = """const { Asking } = await import(process.argv[1]);
const { readFile } = await import("node:fs/promises");
const asking = new Asking({ args: ["--quiet"] });
const picture = (await readFile(process.argv[2]));
const told = [];
await asking.ask("What is the code?", picture, (what) => told.push(what));
await asking.ask("word ".repeat(5000), null, (what) => told.push(what));
await asking.ask("Hello", null, (what) => { told.push({ stopped: true }); asking.stop(); });
await asking.close();
console.log(JSON.stringify(told));"""
DROP = """const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "a.png", { type: "image/png" }));
dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));"""
STUB = """window.asked = [];
window.kvedge = { ask: (...what) => window.asked.push(what), stop: () => window.asked.push("stop"),
                  onTold: (told) => (window.told = told) };"""


@pytest.mark.skipif(not (NODE and PROGRAM.exists()), reason="needs node, and kvedge beside this Python")
def test_what_the_main_process_asks(tmp_path):
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "kvedge").symlink_to(ROOT / "packages" / "node")
    module = shutil.copy(EXAMPLE / "asking.js", tmp_path / "asking.mjs")
    command = [NODE, "--input-type=module", "-e", ASK, str(module), str(SCENE)]
    environment = {**os.environ, "KVEDGE_PROGRAM": str(PROGRAM)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "".join(one.get("text", "") for one in told) == "64UM3"
    assert [round(one["share"], 2) for one in told if "share" in one] == [0.51]
    assert "the available context size (4096)" in next(one["error"] for one in told if "error" in one)
    assert told[-1] == {"stopped": True}


def test_the_page():
    from browser import browsing, needed

    if needed.args[0]:
        pytest.skip("needs chromium and chromedriver")
    with browsing() as driver:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": STUB})
        driver.get((EXAMPLE / "index.html").as_uri())
        driver.execute_script(DROP, base64.b64encode(SCENE.read_bytes()).decode())
        until(lambda: driver.execute_script("return document.getElementById('picture').naturalWidth"))
        driver.find_element("id", "question").send_keys("What is the code?\n")
        asked = driver.execute_script("return window.asked.map(([text, bytes]) => [text, bytes.byteLength])")
        assert asked == [["What is the code?", SCENE.stat().st_size]]
        driver.execute_script("told({ text: '64<b>' }); told({ text: 'UM3' }); told({ share: 0.5075 })")
        assert driver.find_element("id", "answer").text == "64<b>UM3"
        assert driver.find_element("id", "kept").text == "51% of the KV cache is kept"
        driver.find_element("id", "stop").click()
        assert driver.execute_script("return window.asked.at(-1)") == "stop"
        assert not [line for line in driver.get_log("browser") if line["level"] == "SEVERE"]
