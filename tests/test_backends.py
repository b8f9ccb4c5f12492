"""Packages with a ggml backend: found by entry point, checked, loaded. An unused package has a reason."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_libraries
from llama_source import ROOT, pin

from pykvedge.native import backends, libcheck, libraries

pytestmark = [test_libraries.LINUX, pytest.mark.skipif(test_libraries.COMPILER is None, reason="no C compiler")]
# a backend with a registration and the given number of devices, all at one address; no device is ever used
MODULE = """
#include "ggml-backend-impl.h"
static const char * name(ggml_backend_reg_t reg) { (void) reg; return NAME; }
static size_t count(ggml_backend_reg_t reg) { (void) reg; return DEVICES; }
static const char * device_name(ggml_backend_dev_t dev) { (void) dev; return NAME "0"; }
static const char * described(ggml_backend_dev_t dev) { (void) dev; return "made up"; }
static void memory(ggml_backend_dev_t dev, size_t * free, size_t * total) { (void) dev; *free = *total = 1 << 20; }
static enum ggml_backend_dev_type type(ggml_backend_dev_t dev) { (void) dev; return TYPE; }
static void props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * out) {
    out->name = device_name(dev), out->description = described(dev), out->type = TYPE, out->device_id = "0000:01:00.0";
}
static ggml_backend_dev_t get(ggml_backend_reg_t reg, size_t i);
static struct ggml_backend_reg it = { GGML_BACKEND_API_VERSION, { name, count, get, 0 }, 0 };
static struct ggml_backend_device device = { .iface = { .get_name = device_name, .get_description = described,
                                             .get_memory = memory, .get_type = type, .get_props = props }, .reg = &it };
static ggml_backend_dev_t get(ggml_backend_reg_t reg, size_t i) { (void) reg; (void) i; return &device; }
ggml_backend_reg_t ggml_backend_init(void) { return &it; }
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory, native):
    """Compiles modules: with one device, with none, and two with the same GPU."""
    build = max((ROOT / "build").glob("py3-none-*"), key=lambda path: path.stat().st_mtime)
    ggml = build / "llama.cpp" / "ggml"
    folder = tmp_path_factory.mktemp("modules")
    flags = [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    kinds = {0: ("Made", 0, "ACCEL"), 1: ("Made", 1, "ACCEL"), "Made": ("Made", 1, "GPU"), "Other": ("Other", 1, "GPU")}
    return {
        key: test_libraries.library(
            folder, f"libggml-made-{key}.so", MODULE, *flags, f'-DNAME="{name}"', f"-DDEVICES={n}",
            f"-DTYPE=GGML_BACKEND_DEVICE_TYPE_{kind}",
        ).read_bytes()
        for key, (name, n, kind) in kinds.items()
    }  # fmt: skip


@pytest.fixture
def said(tmp_path, kvedge):
    """Installs packages, and returns kvedge's report of them, from a separate process."""

    def of(*packages, **more):
        for name, content, built_from, *backend in packages:
            module = name.replace("-", "_")
            (tmp_path / module).mkdir()
            (tmp_path / module / "libmade.so").write_bytes(content)
            (tmp_path / module / "__init__.py").write_text(f"MODULE, PIN = 'libmade.so', {built_from!r}\n")
            info = tmp_path / f"{module}-1.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            (info / "entry_points.txt").write_text(f"[kvedge.backends]\n{[*backend, 'Made'][0]} = {module}\n")
        code = (
            "from pykvedge.native import backends, ggml, libraries\nlibraries.load_backends()\n"
            "for p in backends.packages(): print(p.name, p.broken, p.problem)\n"
            "print(*(d.name for d in ggml.devices()))\n"
            "from pykvedge.models.offload import Offload\nprint(*(d.name for d in Offload().devices()))\n"
        )
        env = {**test_libraries.os.environ, "PYTHONPATH": str(tmp_path), **more}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        *lines, devices, of.chosen = done.stdout.splitlines()
        return lines, "Made0" in devices.split()

    return of


def test_the_build_says_its_pin(native):
    assert (libraries.require_dir() / backends.PIN_FILE).read_text().strip() == pin()


def test_a_package_is_found_and_the_doctor_names_it(said, modules, kvedge, tmp_path):
    assert said(("made-up", modules[1], pin())) == (["made-up False "], True)
    done = kvedge("chat", "--device", "CUDA0", "hello", env={"PYTHONPATH": str(tmp_path)})
    done.failed(2, "the device CUDA0 does not exist", "Made0")


def test_a_package_of_another_pin_is_not_loaded(said, modules):
    lines, there = said(("made-up", modules[1], "0.3.35-0123456789ab"))
    assert not there and lines[0].startswith(
        "made-up True the package is built for llama.cpp 0.3.35-0123456789ab, but this kvedge"
    )
    assert pin() in lines[0]


def test_of_two_packages_the_later_one_is_used(said, modules):
    lines, there = said(("made-12", modules[1], pin()), ("made-13", modules[1], pin()))
    assert there and lines[0] == "made-13 False "
    assert (
        lines[1] == "made-12 False made-13 has the same devices and is used; uninstall one of the two packages with pip"
    )


def test_of_two_backends_of_one_gpu_the_first_by_name_is_used(said, modules):
    """CUDA is used before Vulkan, so that a GPU's memory is not counted twice."""
    packages = [(f"kvedge-{name}", modules[name], pin(), name) for name in ("Other", "Made")]
    lines, there = said(*packages)
    assert there and lines == ["kvedge-Made False ", "kvedge-Other False "] and said.chosen == "Made0"


def test_where_the_later_one_has_no_device_the_other_is_used(said, modules):
    lines, there = said(("made-12", modules[1], pin()), ("made-13", modules[0], pin()))
    assert there and lines == ["made-13 False the package finds no device", "made-12 False "]


def test_a_package_of_a_build_that_does_not_say_its_pin(said, modules, tmp_path):
    folder = tmp_path / "libraries"
    shutil.copytree(libraries.require_dir(), folder)
    (folder / backends.PIN_FILE).unlink()
    lines, there = said(("made-up", modules[1], pin()), KVEDGE_LIB_DIR=str(folder))
    assert not there and "of an unknown version" in lines[0]


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(60)])
def test_a_file_that_is_no_module(said, content):
    lines, there = said(("made-up", content, pin()))
    assert not there and len(lines) == 1 and lines[0].startswith("made-up True ")
    assert lines[0].endswith("pip install --force-reinstall made-up")


def test_the_doctor_finds_a_broken_package(said, kvedge, tmp_path):
    said(("made-up", b"no library", pin()))
    env = {"PYTHONPATH": str(tmp_path)}
    done = kvedge("doctor", "--json", env=env, timeout=900)
    assert done.code == 1 and len(done.json["faults"]) == 1
    assert done.json["faults"][0].startswith("made-up: ") and "Traceback" not in done.err


def test_what_the_loader_says_of_a_driver():
    module = Path("libggml-cuda.so")
    missing = "libcuda.so.1: cannot open shared object file: No such file or directory"
    assert libcheck.lacks_driver(missing) and "install NVIDIA's driver" in str(libcheck.explain(module, missing))
    mapped = "/m/libggml-cuda.so: failed to map segment from shared object"
    assert not libcheck.lacks_driver(mapped) and "noexec" in str(libcheck.explain(module, mapped))


def test_devices_are_measured_and_a_wrong_answer_is_a_finding(monkeypatch, native):
    """The CPU replaces a device."""
    from pykvedge.doctor import checks
    from pykvedge.errors import UnsoundError

    monkeypatch.setattr(checks, "MEASURED_BYTES", (1 << 20, 2 << 20))
    monkeypatch.setattr(checks, "MEASURED_S", 0.01)
    step = next(step for step in checks.devices() if step.name == "CPU")
    facts = step.run(lambda what: None)
    assert all(facts[name] > 0 for name in ("bytes_per_second", "prompt_tokens_per_second", "answer_tokens_per_second"))
    monkeypatch.setattr(checks, "EXPECTED", "something else")
    with pytest.raises(UnsoundError, match="instead of 'something else'"):
        step.run(lambda what: None)
