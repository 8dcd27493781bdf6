"""What tests/startup/sitecustomize.py keeps for other processes is what transformers finds."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import import_utils

STARTUP = Path(__file__).resolve().parents[1] / "startup"


def test_a_folder_is_read_once_until_its_files_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)  # nothing of this process is replaced
    keeping = runpy.run_path(str(STARTUP / "sitecustomize.py"))["keeping"]
    asked: list[str] = []

    def define(module_path: Path, prefix: str | None = None) -> Any:
        asked.append(prefix or "")
        import_utils.create_import_structure_from_path.cache_clear()
        found = import_utils.create_import_structure_from_path(module_path)
        return prefix, import_utils.spread_import_structure(found)

    models, kept = tmp_path / "models", tmp_path / "kept"
    models.mkdir()
    (models / "modeling_one.py").write_text('__all__ = ["One"]\n')
    found = keeping(define, str(kept))(models, prefix="models")
    assert found == define(models, "models") and "One" in str(found)
    assert keeping(define, str(kept))(models, prefix="models") == found
    assert len(asked) == 2
    assert keeping(define, str(kept))(models, prefix="other") != found
    (models / "modeling_two.py").write_text('__all__ = ["Two"]\n')
    assert "Two" in str(keeping(define, str(kept))(models, prefix="models"))
    for file in kept.iterdir():
        file.write_bytes(file.read_bytes()[:20])  # as after a full disk
    assert "Two" in str(keeping(define, str(kept))(models, prefix="models"))


@pytest.mark.skipif(
    str(STARTUP) not in sys.path or sys.pycache_prefix is None, reason="only tools/run_tests.sh"
)
def test_processes_of_a_test_run_use_it() -> None:
    assert import_utils.define_import_structure.__name__ == "define_or_read"
