"""Builds native/ without llama.cpp, for sanitizers and other systems. Each set of options has a folder."""

from pathlib import Path

from build_stock import cmake
from llama_source import ROOT

# arguments for fewer cases: under an emulator or the thread sanitizer, all cases take minutes
FEWER_CASES = {"test_attention": ["3"], "test_faults": ["11"], "test_session": ["20"]}
# models of kvedge-glue-tests: small, because the test reads some thousand prompts. With f16 weights, llama.cpp rounds
# inputs to f16: the last bit of a sum, which depends on the processor, would move logits by 5e-3
GLUE_SHAPE = {"head_size": 32, "n_vocab": 512, "weight": "f32"}
# tests with several threads
THREADED = ("test_attention", "test_bounded", "test_custom", "test_handle_guard", "test_memory", "test_spill")
# tests that depend on the processor or the system
MACHINE_DEPENDENT = (
    "test_attention", "test_check_kernels", "test_crash", "test_files", "test_handle_guard", "test_kernels",
    "test_memory", "test_session", "test_spill", "test_storage", "test_structs",
)  # fmt: skip


def build_native(name: str, targets: list[str], **options: str) -> Path:
    """Builds `targets` of native/ with CMake options into build/native/NAME. Returns the folder of the programs.

    Raises SourceError when a tool is missing or the build fails.
    """
    folder = ROOT / "build" / "native" / name
    cmake(ROOT / "native", folder, {"KVEDGE_PCH": "ON", **options}, *targets)
    return folder / "bin"
