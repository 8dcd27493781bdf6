"""tools/compare_formats.py on a tiny model."""

from __future__ import annotations

from pathlib import Path

import compare_formats
import pytest

from tests.tiny_models import make_tiny_model


def test_fewer_bits_change_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model("nemotron_h", tmp_path)
    arguments = ["--load", str(tmp_path), "--tokens", "40", "--formats", "int8,fp8,nvfp4"]
    monkeypatch.setattr("sys.argv", ["compare_formats.py", *arguments])
    assert compare_formats.main() == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["int8", "fp8", "nvfp4"]
    divergences = [float(row[1]) for row in rows]
    assert 0 < divergences[0] < divergences[1] < divergences[2]
