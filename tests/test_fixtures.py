"""The model fixtures load, count image tokens as the real models do, and generate with finite logits."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import llama_cpp.llama_cpp as llama
import make_shape_model
import numpy as np
import pytest
from choosing import crossed, whole
from conftest import ROOT
from llama_source import ended
from modelgen import tokens
from modelgen.shapes import SHAPES
from modelgen.text import text_model
from modelgen.tiny import KINDS, TinySpec, default_spec, write_tiny
from modelgen.vision import vision_model
from stock_runner import Answer, Runner, picture


def check(answer: Answer) -> None:
    assert np.isfinite(answer.logits).all()
    # Logits that are neither flat nor decided: degenerate logits would test nothing.
    assert 0.5 < answer.logits.std(axis=1).mean() < 20
    probability = np.exp(answer.logits - answer.logits.max(axis=1, keepdims=True))
    best = 1 / probability.sum(axis=1)
    assert best.mean() < 0.99
    assert len(set(answer.ids)) > 1
    assert answer.text.strip()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_generates(kind: str, tmp_path: Path) -> None:
    model, mmproj = write_tiny(kind, tmp_path)
    assert model.stat().st_size < 8 << 20
    with Runner(model, mmproj) as runner:
        check(runner.answer())
        if mmproj:
            first, second = (runner.answer(picture(90, 60, seed)) for seed in (0, 1))
            check(first)
            assert first.prompt_tokens > first.image_tokens > 0
            # Another picture gives other logits.
            assert not np.allclose(first.logits[0], second.logits[0], atol=1e-3)


@pytest.mark.parametrize("kind", ["llava", *whole("qwen2vl")])
@pytest.mark.parametrize(("head_size", "heads"), crossed([64, 80, 96, 128], [(4, 4), (4, 2), (4, 1)], [(4, 2)], [80]))
def test_head_shapes(kind: str, head_size: int, heads: tuple[int, int], tmp_path: Path) -> None:
    spec = TinySpec(n_layers=1, n_heads=heads[0], n_heads_kv=heads[1], head_size=head_size)
    with Runner(*write_tiny(kind, tmp_path, spec=spec)) as runner:
        assert llama.llama_model_n_head_kv(runner.model) == heads[1]
        assert llama.llama_model_n_embd(runner.model) == heads[0] * head_size
        assert np.isfinite(runner.answer(picture(60, 60), n=2).logits).all()


def test_same_spec_same_bytes(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> str:
        files = write_tiny("llava", tmp_path / name, spec=replace(default_spec("llava"), seed=seed))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files if path)).hexdigest()

    assert digest("a", 0) == digest("b", 0) != digest("c", 1)


def test_any_text_survives_the_tokenizers(tmp_path: Path) -> None:
    text = "Zażółć 図 😀\n\tx=1;  two  spaces"
    for kind in ("llama", "qwen3"):
        with Runner(write_tiny(kind, tmp_path / kind)[0]) as runner:
            assert b"".join(map(runner.piece, runner.tokenize(text))).decode().strip() == text


# Numbers of parameters of the published models: text model, and vision tower with projector.
PARAMETERS = {
    "llava-1.4b": (1_364_297_728, 297_204_736),
    "llava-1.5-7b": (6_738_415_616, 311_888_896),
    "mobilevlm-1.7b": (1_364_297_728, 297_225_216),
    "qwen2-vl-2b": (1_543_714_304, 665_271_296),
    "smolvlm-500m": (409_252_800, 98_229_504),
    "qwen2.5-vl-3b": (3_085_938_688, 668_684_288),
    "qwen3-vl-2b": (1_720_574_976, 406_957_056),
    "gemma-3-4b": (3_880_263_168, 419_816_304),
    "internvl3-1b": (494_032_768, 308_495_104),
    "lfm2-vl-1.6b": (1_170_340_608, 411_055_008),
    "pixtral-12b": (12_247_782_400, 434_962_432),
}


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes(name: str) -> None:
    shape = SHAPES[name]
    spec = shape.text()
    meta, tensors = text_model(spec)
    count = [sum(t.elements for t in part) for part in (tensors, vision_model(shape.vision)[1])]
    assert tuple(count) == PARAMETERS[name]
    words = meta["tokenizer.ggml.tokens"]
    assert len(words) == len(set(words)) == len(meta["tokenizer.ggml.token_type"]) == spec.vocab.size
    assert len({t.name for t in tensors}) == len(tensors)


@pytest.fixture
def small_llava(monkeypatch: pytest.MonkeyPatch) -> str:
    """llava-1.4b with its real width and image size, but few layers and tokens."""
    real = SHAPES["llava-1.4b"]
    text = replace(real.text(), n_layers=1, vocab=tokens.spm(1024))
    small = replace(real, text=lambda: text, vision=replace(real.vision, n_layers=2))
    monkeypatch.setitem(SHAPES, "llava-1.4b", small)
    return "llava-1.4b"


@pytest.mark.parametrize(("quant", "mmproj_quant"), [("q4_0", "q8_0"), *whole(("q8_0", "f16"), ("f16", "q8_0"))])
def test_shape_command(quant, mmproj_quant, small_llava, tmp_path, capsys):
    argv = [small_llava, "--quant", quant, "--mmproj-quant", mmproj_quant, "-o", str(tmp_path), "--json"]
    make_shape_model.main(argv)
    report = json.loads(capsys.readouterr().out)
    model, mmproj = Path(report["model"]), Path(report["mmproj"])
    assert model.stat().st_size == report["model_bytes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mmproj.gguf", "model.gguf"]
    with Runner(model, mmproj) as runner:
        answer = runner.answer(picture(120, 77), n=4)
    assert answer.image_tokens == 576
    check(answer)


def test_shape_command_refuses(small_llava, tmp_path, capsys, monkeypatch):
    argv = [small_llava, "-o", str(tmp_path), "--vision", "none"]
    make_shape_model.main(argv)
    assert capsys.readouterr().out.split() == [str(tmp_path / "model.gguf")]
    assert not (tmp_path / "mmproj.gguf").exists()

    def fails(argv: list[str], code: int, says: str) -> None:
        try:
            assert ended(lambda: make_shape_model.main(argv)) == code
        except SystemExit as stop:
            assert stop.code == code
        out, err = capsys.readouterr()
        assert out == "" and says in err and err.count("\n") == 1

    fails(argv, 1, "--force")
    make_shape_model.main([*argv, "--force"])
    capsys.readouterr()
    fails(["llava-9", "-o", str(tmp_path)], 2, "llava-9")
    fails([small_llava], 2, "-o")
    fails([small_llava, "--quant", "q9", "-o", str(tmp_path)], 2, "q9")
    fails([small_llava, "-o", str(tmp_path / "model.gguf")], 1, "model.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    fails([small_llava, "-o", str(tmp_path / "new")], 1, "disk space")


def test_shape_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make_shape_model.main(["--list"])
    assert not stop.value.code
    out = capsys.readouterr().out
    assert all(name in out for name in SHAPES)


def test_a_list_that_nobody_reads_ends_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, ROOT / "scripts" / "make_shape_model.py", "--list"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("modelgen.writer._write_tensors", full)
    with pytest.raises(OSError, match="disk full"):
        write_tiny("llama", tmp_path)
    assert list(tmp_path.iterdir()) == []
