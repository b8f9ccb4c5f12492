"""Little address space (ulimit -v) is one line, wherever it ends. scripts/memory_limits.py tries all limits."""

from __future__ import annotations

import sys

import memory_limits
import pytest
from choosing import whole

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of the address space")


@linux
@pytest.mark.parametrize("megabytes", [290, 420, *whole(210, 340, 370, 480)])
def test_too_little_address_space_is_one_line(environment, native, megabytes):
    """Where ggml asserted (from 280 MB on), where memory ended between two checks (400), and just before the answer."""
    ended = memory_limits.run(megabytes * 10**6, environment=environment)
    assert ended.answered or ended.refused, ended
    assert ended.answered or "memory" in ended.err, ended


@linux
def test_enough_address_space_is_an_answer(environment, native):
    assert memory_limits.run(700 * 10**6, environment=environment).answered


@linux
def test_text_alone_needs_less(environment, native, tiny):
    arguments = [*tiny("llama").arguments(), "--max-tokens", "2", "Hello there."]
    for megabytes in (260, 320):
        ended = memory_limits.run(megabytes * 10**6, arguments, environment)
        assert ended.answered or ended.refused, (megabytes, ended)
    assert ended.answered
