"""Frames of a video become its pictures, whatever the file contains. ffmpeg makes and unpacks the files."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest

import pykvedge
from pykvedge import ImageError, UsageError, frames

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")
WIDTH, HEIGHT, N = 64, 48, 8  # size and frames of the clips, with two frames per second


def write(path: Path, *how: str) -> np.ndarray:
    """Writes a clip of noise. Returns its pixels, [N, HEIGHT, WIDTH, 3]."""
    pixels = np.random.default_rng(3).integers(0, 256, (N, HEIGHT, WIDTH, 3), dtype=np.uint8)
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{WIDTH}x{HEIGHT}", "-r", "2", "-i", "-"]
    command = ["ffmpeg", "-loglevel", "error", "-y", *raw, *how, str(path)]
    subprocess.run(command, input=pixels.tobytes(), check=True)
    return pixels


@pytest.fixture
def clip(tmp_path):
    pixels = write(tmp_path / "clip.mkv", "-c:v", "ffv1", "-pix_fmt", "bgr0")  # lossless
    return tmp_path / "clip.mkv", pixels


def of(picture: pykvedge.Picture) -> np.ndarray:
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


@needs_ffmpeg
def test_frames_are_the_pictures_of_the_file(clip):
    path, pixels = clip
    all_of_them = list(frames(path, fps=2))
    assert np.array_equal(np.stack([of(p) for p in all_of_them]), pixels)
    assert [p.name for p in all_of_them[:3]] == ["clip.mkv, 0.0 s", "clip.mkv, 0.5 s", "clip.mkv, 1.0 s"]
    fewer = list(frames(path, fps=1))
    assert len(fewer) == N // 2 and all(any(np.array_equal(of(p), one) for one in pixels) for p in fewer)


@needs_ffmpeg
def test_a_clip_that_was_held_upright_is_turned(tmp_path):
    write(tmp_path / "flat.mp4", "-c:v", "mpeg4")
    data = (tmp_path / "flat.mp4").read_bytes()
    one, zero = (1 << 16).to_bytes(4, "big"), bytes(4)
    flat, upright = one + zero * 3 + one, zero + one + zero + (-(1 << 16)).to_bytes(4, "big", signed=True) + zero
    at = data.index(flat, data.index(b"tkhd"))  # the matrix of the track
    (tmp_path / "up.mp4").write_bytes(data[:at] + upright + data[at + len(flat) :])
    first = next(frames(tmp_path / "up.mp4", fps=2))
    assert (first.width, first.height) == (HEIGHT, WIDTH)


@needs_ffmpeg
def test_who_stops_looking_leaves_no_program_behind(clip):
    for taken in (0, 1, 3):
        some = frames(clip[0], fps=500)
        for _ in range(taken):
            next(some)
        some.close()
    assert not [child for child in psutil.Process().children() if "ffmpeg" in child.name()]


@needs_ffmpeg
@pytest.mark.parametrize("kind", ["empty", "text", "cut", "noise", "playlist", "sound"])
def test_what_is_no_video(kind, clip, tmp_path):
    path, _ = clip
    bad = tmp_path / "bad.mkv"
    whole = path.read_bytes()
    noise = np.random.default_rng(1).bytes(4000)
    playlist = b"ffconcat version 1.0\nfile 'http://127.0.0.1:9/clip.mkv'\n"
    texts = {"text": b"no video\n" * 99, "playlist": playlist}
    bad.write_bytes({**texts, "cut": whole[:300], "noise": noise}.get(kind, b""))
    if kind == "sound":
        tone = ["-f", "lavfi", "-i", "sine=duration=1", "-c:a", "pcm_s16le", str(bad)]
        subprocess.run(["ffmpeg", "-loglevel", "error", "-y", *tone], check=True)
    why = "has only sound and no pictures" if kind == "sound" else "is not a video that ffmpeg can read"
    with pytest.raises(ImageError, match=f"^bad.mkv {why}; --video takes files such as mp4, webm and gif$"):
        list(frames(bad))


@pytest.mark.parametrize("fps", [0, -1, 1e9, float("nan"), "2", True])
def test_impossible_rates(fps, tmp_path):
    with pytest.raises(UsageError, match="the frames per second"):
        next(frames(tmp_path / "clip.mkv", fps=fps))


def test_files_that_are_not_there(tmp_path, monkeypatch):
    for path in (tmp_path / "none.mp4", tmp_path, "x" * 5000, "a\0b"):
        with pytest.raises(ImageError, match="cannot be read"):
            next(frames(path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "clip.mp4").write_bytes(b"x")
    with pytest.raises(UsageError, match="needs ffmpeg"):
        next(frames(tmp_path / "clip.mp4"))


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
@pytest.mark.parametrize(
    "said", ["P6\\n70000 70000\\n255\\n", "P6\\n4 4\\n255\\nabc", "P6\\n4 ", "nonsense\\n", "P6\\n99999999999999"]
)
def test_an_ffmpeg_that_tells_nonsense(said, tmp_path, monkeypatch):
    program = tmp_path / "ffmpeg"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    program.chmod(0o755)
    (tmp_path / "clip.mp4").write_bytes(b"x")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ImageError):
        list(frames(tmp_path / "clip.mp4"))


@needs_ffmpeg
def test_a_video_in_a_stream(clip, kvedge):
    stream = ["--stream", "--method", "snapkv", "--budget", 256, "--max-tokens", 4, "--json"]
    told = kvedge("chat", *stream, "--video", clip[0], "--fps", 2, "What is there?").json
    assert told["tokens"]["image"] == N * 144 and told["stream"]["compressions"] >= N
    fewer = kvedge("chat", *stream, "--video", clip[0], "What is there?").json
    assert fewer["tokens"]["image"] == N // 2 * 144


def test_options_that_do_not_go_together(kvedge, tmp_path):
    kvedge("chat", "--video", "a.mp4", "?").failed(2, "--stream")
    stream = ["chat", "--stream", "--method", "snapkv", "--budget", 256]
    kvedge("chat", "--fps", 1, "?").failed(2, "--fps needs --video")
    kvedge(*stream, "--video", tmp_path / "a.mp4", "?").failed(1, "a.mp4 cannot be read")
    kvedge(*stream, "--video", tmp_path, "--fps", 0, "?").failed(2, "the frames per second")
