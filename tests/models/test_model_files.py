"""What a model's folder lacks is said in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_hybrid import LLM, ConfigurationError, EngineConfig, WeightsError, reference_model
from megatron_hybrid.models.checkpoints.folder import ModelFolder, check_model_files
from megatron_hybrid.models.checkpoints.weight_source import open_folder
from megatron_hybrid.server import cli
from megatron_hybrid.text.tokenizer import Tokenizer

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def refuses(what: Callable[[], object], words: str) -> None:
    with pytest.raises((ConfigurationError, WeightsError), match=words) as caught:
        what()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "which is empty"),
        ([WEIGHTS], "holds no config.json; it must be a Hugging Face model folder or a Megatron"),
        (["metadata.json"], "holds no config.json"),
        ([CONFIG], "has neither model.safetensors nor model.safetensors.index.json.$"),
        ([CONFIG, "model.gguf", "a.bin"], r"what is there \(a.bin, model.gguf\) is not read"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    refuses(lambda: check_model_files(EngineConfig(load=str(tmp_path))), words)


def test_a_name_of_the_hub_is_told_how_to_get_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "no such folder here.* `hf download Org/Some-1.5B --local-dir Some-1.5B` fetches it"
    refuses(lambda: ModelFolder.of(EngineConfig(load="Org/Some-1.5B")), words)
    hub = "could not be had from the Hugging Face hub, .* fetches it"
    refuses(lambda: LLM("Org/Some-1.5B"), hub)
    for path in ("Some-1.5B", "../Org/Name", "/Org/Name", "a/b/c"):
        refuses(lambda path=path: ModelFolder.of(EngineConfig(load=path)), "no such folder.$")
    Path("Org/Some-1.5B").mkdir(parents=True)
    refuses(lambda: ModelFolder.of(EngineConfig(load="Org/Some-1.5B")), "which is empty")
    assert cli.main(["--load", "Org/Some-1.5B"]) == 2
    assert capsys.readouterr().err == "--load names Org/Some-1.5B, which is empty.\n"


def test_a_file_is_no_folder() -> None:
    file = str(reference_model.path() / WEIGHTS)
    refuses(lambda: ModelFolder.of(EngineConfig(load=file)), "which is a file; name the folder")


def test_random_weights_need_none(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    check_model_files(EngineConfig(load=str(tmp_path), load_format="dummy"))
    check_model_files(EngineConfig())


def test_a_tokenizer_that_is_missing_or_broken_is_one_sentence(tmp_path: Path) -> None:
    words = "has no tokenizer .tokenizer.json.; --tokenizer-model can name"
    refuses(lambda: Tokenizer.load(tmp_path), words)
    refuses(lambda: Tokenizer.load(tmp_path / "x"), "--tokenizer-model, .* is not a folder")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    refuses(lambda: Tokenizer.load(tmp_path), "no tokenizer that can be read")
    (tmp_path / "tokenizer.json").write_text("{")
    refuses(lambda: Tokenizer.load(tmp_path), "no tokenizer that can be read")


def test_a_pointer_to_weights_is_told_from_weights(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")

    def read() -> None:
        config = ModelFolder.open(reference_model.path()).config
        with open_folder(ModelFolder.open(tmp_path), config):
            pass

    refuses(read, "is Git LFS's pointer to the weights: `git lfs pull`")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from megatron_hybrid.models.checkpoints.folder import check_model_files; "
        "from megatron_hybrid import EngineConfig; check_model_files(EngineConfig()); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
