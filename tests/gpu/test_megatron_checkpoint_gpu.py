"""What megatron-core's hybrid model saves on a GPU, with mamba_ssm's kernels, is the same model
here; and what we convert to its format is the same model there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convert.conversion import to_hugging_face, to_megatron
from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from tests.gpu.megatron_hybrid_model import PATTERN, TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("mamba_ssm", "causal_conv1d"))),
        reason="needs mamba_ssm and causal_conv1d",
    ),
]
ROOT = Path(__file__).parents[2]


def run(action: str, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.megatron_hybrid_model", action, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by megatron-core, converted to Hugging Face's format and back, read by megatron-core
    again."""
    folder = tmp_path_factory.mktemp("megatron")
    run("save", folder)
    to_hugging_face(folder / "saved", folder / "hf", progress=False)
    to_megatron(folder / "hf", folder / "again", progress=False)
    run("read", folder)
    return folder


def test_the_arguments_say_what_the_model_is(folder: Path) -> None:
    config = ModelFolder.open(folder / "saved").config
    assert (config.model_type, config.pattern) == ("nemotron_h", PATTERN)


def test_its_log_probabilities_are_ours(folder: Path) -> None:
    """Of a prompt's own tokens: its scan multiplies in TF32, hence the tolerance."""
    logits = torch.load(folder / "logits").log_softmax(-1)
    expected = logits[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]
    llm = LLM(
        load=str(folder / "saved"),
        dtype="float32",
        inference_dynamic_batching_buffer_size_gb=0.1,
        inference_dynamic_batching_max_requests=8,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([TOKENS], params)
    ours = torch.tensor([entry.logprob for entry in output.prompt_logprobs or [] if entry])
    torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)
    assert output.token_ids == [int(logits[-1].argmax())]


def test_megatron_reads_what_we_write(folder: Path) -> None:
    """The same weights in two processes, each of which tunes its TF32 kernels for itself."""
    expected, found = torch.load(folder / "logits"), torch.load(folder / "logits2")
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
