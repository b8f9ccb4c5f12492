"""kvedge doctor: this machine is sound, and every fault gets one line with its remedy."""

import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
from choosing import whole

from pykvedge import UnsoundError, errors
from pykvedge.doctor import checks, diagnosis
from pykvedge.native import ggml, libraries
from pykvedge.system import cpu

posix = pytest.mark.skipif(sys.platform == "win32", reason="ends processes by signals")
DO = diagnosis.remedy("made up", "")


def diagnose(*groups: str, **settings) -> diagnosis.Diagnosis:
    """Runs the steps of functions in doctor_checks.py."""
    return diagnosis.diagnose(list(groups), "doctor_checks", **settings)


@pytest.fixture(scope="module")
def examined(kvedge, native):
    """The report of `kvedge doctor --json` about this machine."""
    return kvedge("doctor", "--json", timeout=900)


def test_this_machine_is_sound(examined):
    assert examined.code == 0, examined
    found = examined.json
    assert found["sound"] and found["faults"] == [] and examined.err == ""
    assert [c for c in found["checks"] if not c["sound"]] == []
    assert {c["group"] for c in found["checks"]} == {"libraries", "kernels", "products", "model"}


def test_every_kind_of_weight_is_multiplied_in_every_memory_that_takes_it(examined):
    names = {c["name"] for c in examined.json["checks"] if c["group"] == "products"}
    known = {f"{k.name} in CPU memory" for k in gguf.GGMLQuantizationType if k.name not in checks._NOT_WEIGHTS}
    assert known <= names and len(known) > 25
    for memory in examined.json["libraries"]["weight_memory"]:
        assert f"Q4_0 in {memory} memory" in names


def test_what_the_machine_is(examined, native):
    found = examined.json
    m, facts = found["machine"], found["libraries"]
    assert m["cpu"] == cpu.name() and m["memory_bytes"] >= m["available_bytes"] > 0
    assert facts["kernels"] == native.kernel_tables() and facts["kernels"][0] == native.simd()
    assert facts["libraries"] == str(libraries.require_dir())
    assert [c["name"] for c in found["checks"] if c["group"] == "kernels"] == facts["kernels"]
    assert any(d["kind"] == "CPU" and d["total_bytes"] > 0 for d in facts["devices"])
    answers = [c["facts"]["answer"] for c in found["checks"] if c["group"] == "model"]
    assert len(answers) == 2 and answers[0] == answers[1] and "the code" in answers[0]


def test_the_screen(capsys):
    from pykvedge.cli.doctor import _show

    _show(diagnose("sound"))
    out = capsys.readouterr().out
    assert "check: sound" in out and "sound: first, second" in out and cpu.name() in out
    assert out.splitlines()[-1].startswith("kvedge is sound on this machine")
    _show(diagnose("wrong"))
    out = capsys.readouterr().out
    assert "2 of 3 unsound" in out and out.splitlines()[-1].startswith("kvedge is not sound")
    assert f"unsound: wrong of first: wrong: off by 2; {DO}" in out.splitlines()


def test_sound_steps_and_their_facts():
    found = diagnose("sound")
    assert found.sound and found.faults() == []
    assert [(o.name, o.facts) for o in found.outcomes] == [("first", {"n": 3}), ("second", {})]


def test_a_hang_is_ended():
    """The start of a child does not count as a hang, because a busy machine is slow."""
    found = diagnose("hang", patience_s=3.0)
    assert found.faults() == [f"hang of first: hangs: no output for 3 s; {DO}"]
    assert [o.name for o in found.outcomes if not o.fault] == ["second"]


ILL = "ended by illegal instruction at seven rows"
SEGV = "ended by segmentation fault"


@posix
@pytest.mark.parametrize(
    ("group", "said", "sound"),
    [
        ("crash_between_sound_ones", [f"second: {ILL}"], ["first", "third"]),
        (
            "crash_often",
            [f"T0, T1, T2 in AMX memory: {ILL} (3 more were not tried after that)"],
            ["T0 in CPU memory"],
        ),
        ("abort", ["first: ended by abort (GGML_ASSERT(1 == 2) failed)"], []),
        *whole(
            ("wrong", ["first: wrong: off by 2", "second: ZeroDivisionError: division by zero"], ["third"]),
            ("crash_before_any", [f"the check of crash_before_any, between two steps: {SEGV}"], []),
            ("leave", ["first: ended by exit code 7"], []),
            ("missing", ["the check of missing, between two steps: AttributeError: module 'doctor_checks' has no"], []),
        ),
    ],
)
def test_what_is_unsound_is_a_finding_of_one_step_and_the_others_are_run(group, said, sound):
    found = diagnose("sound", group, "sound_as_well")
    faults = [line.removeprefix(f"{group} of ") for line in found.faults()]
    assert len(faults) == len(said) and not found.sound
    for line, begin in zip(faults, said, strict=True):
        assert line.startswith(begin) and line.endswith(f"; {DO}")
    assert [o.name for o in found.of(group) if o.tried and not o.fault] == sound
    assert [o.name for o in found.of("sound_as_well") if o.tried and not o.fault] == ["first", "second"]


@posix
def test_without_libraries_nothing_else_is_tried():
    found = diagnose("crash_before_any", "sound", "wrong")
    assert [(o.name, o.tried) for o in found.outcomes] == [("", True), ("", False), ("", False)] and not found.sound


def test_how_programs_end():
    assert diagnosis.how_it_ended(0) == diagnosis.how_it_ended(1) == ""
    assert diagnosis.how_it_ended(-4) == diagnosis.how_it_ended(0xC000001D) == "illegal instruction"
    assert diagnosis.how_it_ended(0xC0000005) == "access violation"


def test_libraries_that_are_none(kvedge, tmp_path):
    for name in ("llama", "kvedge", "mtmd"):
        (tmp_path / libraries.file_name(name)).write_bytes(b"no library")
    done = kvedge("doctor", env={"KVEDGE_LIB_DIR": str(tmp_path)})
    assert done.code == 1
    lines = [line for line in done.out.splitlines() if line.startswith("unsound: ")]
    assert lines[0].startswith("unsound: llama.cpp and its bindings") and "build" in lines[0]
    assert "Traceback" not in done.out + done.err


@pytest.mark.skipif(sys.platform != "linux", reason="puts a function in front of the library's by LD_PRELOAD")
def test_code_that_this_processor_cannot_run(monkeypatch, tmp_path, native):
    """Every matrix product ends its process, as code for another CPU does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler"
    source, library = tmp_path / "broken.c", tmp_path / "broken.so"
    source.write_text("#include <signal.h>\nint ggml_graph_compute(void) { raise(SIGILL); return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    found = diagnosis.diagnose(["products"])
    assert not found.sound and not any(o.tried and not o.fault for o in found.outcomes)
    for memory, remedy in [("AMX", "-DKVEDGE_AMX=OFF"), ("CPU_REPACK", "-DGGML_CPU_REPACK=OFF")]:
        told = [f for f in found.faults() if f"in {memory} memory" in f]
        assert len(told) == (memory in {o.part for o in found.outcomes})
        assert all("ended by illegal instruction at 1 row" in f and remedy.lstrip("-D") in f for f in told)
    assert any("in CPU memory: ended by illegal instruction" in f for f in found.faults())


def test_a_product_that_is_wrong_is_found(monkeypatch, native):
    """One value of hundreds is wrong, by an amount near the tolerance of its type."""
    memory = dict(ggml.buffer_types(ggml.cpu()))["CPU"]
    times = ggml.Weight.times

    def one_off(self, data, rows, experts):
        got = times(self, data, rows, experts)
        got[-1, -1] += 2.5 * checks.TOLERANCE * np.sqrt(checks.K)
        return got

    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F32):
        assert checks._check(kind, memory, [1], lambda what: None)["error"] < checks.TOLERANCE
        monkeypatch.setattr(ggml.Weight, "times", one_off)
        with pytest.raises(UnsoundError, match="wrong: 1 row "):
            checks._check(kind, memory, [1], lambda what: None)
        monkeypatch.setattr(ggml.Weight, "times", lambda *a: np.full_like(times(*a), np.nan))
        with pytest.raises(UnsoundError):
            checks._check(kind, memory, [1, checks.EXPERTS], lambda what: None)
        monkeypatch.setattr(ggml.Weight, "times", times)


def test_random_bits_are_weights(native):
    """gguf's reader and ggml must find the same values in random bits."""
    for name in checks._ANY_BITS:
        kind = gguf.GGMLQuantizationType[name]
        data, values = checks._weight(kind, 8, np.random.default_rng(1))
        assert np.isfinite(values).all() and values.std() > 0.01
        np.testing.assert_allclose(ggml.widened(kind, data, checks.K), values, rtol=1e-5, atol=1e-6)


def test_kernels_by_name(native):
    tables = native.kernel_tables()
    assert tables[0] == native.simd() and tables[-1] == "generic" and len(set(tables)) == len(tables)
    with pytest.raises(errors.UnknownNameError, match="no kernels 'mmx'"):
        native.check_kernels("mmx")


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        ("model name\t: A Chip\nflags\t\t: fpu avx2 fma amx_int8 sse2\n", "A Chip", ["avx2", "fma", "amx_int8"]),
        ("BogoMIPS\t: 50\nFeatures\t: fp asimd asimddp i8mm crc32\n", None, ["neon", "dotprod", "i8mm"]),
        ("something else\n", None, None),
    ],
)  # fmt: skip
@pytest.mark.skipif(sys.platform == "darwin", reason="asks sysctl there")
def test_features_of_processors(monkeypatch, tmp_path, text, name, features):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    assert cpu.features() == features
    assert cpu.name() == name if name else cpu.name()


@posix
def test_a_crash_of_the_demo_points_at_the_doctor(monkeypatch, tmp_path, capfd):
    import dev_commands

    program = tmp_path / "kvedge"
    monkeypatch.setattr(dev_commands, "ensure_package", lambda: None)
    monkeypatch.setattr(dev_commands, "venv_program", lambda name: str(program))
    for body, code, said in [
        ("kill -ILL $$", 1, "error: kvedge chat ended by illegal instruction; python3 scripts/dev.py doctor says"),
        ("kill -SEGV $$", 1, "error: kvedge chat ended by segmentation fault; python3"),
        ("exit 2", 2, ""),
        ("echo well", 0, ""),
    ]:
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        assert dev_commands.demo([]) == code
        err = capfd.readouterr().err
        assert said in err and bool(said) == ("doctor" in err)


@posix
def test_a_build_ends_with_the_doctor(monkeypatch, tmp_path, capfd):
    import dev_commands

    program = tmp_path / "kvedge"
    program.write_text('#!/bin/sh\necho "$1 speaks"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(dev_commands, "ensure_package", lambda **settings: None)
    monkeypatch.setattr(dev_commands, "venv_program", lambda name: str(program))
    assert dev_commands.build([]) == 1
    out, err = capfd.readouterr()
    assert out == "" and "doctor speaks" in err


def test_the_remedy_fits_how_kvedge_was_installed(monkeypatch, tmp_path):
    assert diagnosis.remedy("products", "AMX").endswith("dev.py build -DKVEDGE_AMX=OFF")
    monkeypatch.setattr(diagnosis.pykvedge, "__file__", str(tmp_path / "pykvedge" / "__init__.py"))
    assert diagnosis.remedy("products", "AMX").endswith("-C cmake.define.KVEDGE_AMX=OFF")
