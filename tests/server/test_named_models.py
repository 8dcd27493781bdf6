"""`serve MODEL`: a folder, or a name on the Hugging Face hub, here a small one on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from json import dumps
from pathlib import Path

import pytest

from megatron_hybrid import LLM, SamplingParams, reference_model
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints import hub
from megatron_hybrid.server import cli
from megatron_hybrid.server.options import LaunchOptions
from tests.server.running import ROOT, http_server

NAME, COMMIT, OTHER_COMMIT = "some-one/Small-1.5", "c" * 40, "d" * 40
FILES = {
    "config.json": b"{}",
    "generation_config.json": b'{"top_k": 3}',
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights",
    "pytorch_model.bin": b"a pickle",
    "modeling_small.py": b"print('code')",
    "onnx/config.json": b"{}",
    "README.md": b"# Small",
}
WANTED = {
    "config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "merges.txt",
    "model.safetensors",
}  # fmt: skip
TOKEN = "hf_secret"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for: a revision's commit, its files, and what is in them."""

    asked: list[str]

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_CONNECT(self) -> None:
        self.asked.append(self.path)
        self.reply(b"", 407, {}, with_body=False)

    def answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        api, path = f"/api/models/{NAME}", self.path.partition("?")[0]
        commits = {"main": COMMIT, "v2": OTHER_COMMIT}
        private = "some-one/private" in path
        if private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(b"{}", 401, {"X-Error-Code": "RepoNotFound"}, with_body)
        path = path.replace("some-one/private", NAME)
        if path.startswith(f"{api}/revision/"):
            commit = commits.get(path.rpartition("/")[2])
            if commit is None:
                return self.reply(b"{}", 404, {"X-Error-Code": "RevisionNotFound"}, with_body)
            return self.reply(dumps({"id": NAME, "sha": commit}).encode(), 200, {}, with_body)
        if path.startswith(f"{api}/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{number:040x}"}
                for number, (name, data) in enumerate(FILES.items())
            ]
            return self.reply(dumps(files).encode(), 200, {}, with_body)
        if path.startswith(f"/{NAME}/resolve/"):
            commit, _, name = path.removeprefix(f"/{NAME}/resolve/").partition("/")
            number = f'"{list(FILES).index(name):040x}"'
            return self.reply(
                FILES[name], 200, {"ETag": number, "X-Repo-Commit": commit}, with_body
            )
        return self.reply(b"{}", 404, {"X-Error-Code": "RepoNotFound"}, with_body)

    def reply(self, data: bytes, status: int, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


FETCH = """
import sys
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints import hub
try:
    print(hub.fetch(sys.argv[1], sys.argv[2] or None, weights=sys.argv[3] == "1"))
except ConfigurationError as error:
    print(error)
"""
Fetch = Callable[..., str]


@contextmanager
def small_hub() -> Iterator[str]:
    """Its address."""
    Hub.asked = []
    with http_server(Hub) as address:
        yield address


@pytest.fixture
def hub_url() -> Iterator[str]:
    with small_hub() as url:
        yield url


@pytest.fixture
def fetch(tmp_path: Path, hub_url: str) -> Fetch:
    """hub.fetch in a process of its own, as huggingface_hub reads its variables when it is
    imported: where the files are, or why they are not."""

    def run(name: str = NAME, revision: str = "", *, weights: bool = True, **env: str) -> str:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", FETCH, name, revision, str(int(weights))],
            env={
                **clean,
                "PYTHONPATH": str(ROOT),
                "HF_HOME": str(tmp_path / "home"),
                "HF_ENDPOINT": hub_url,
                "NO_PROXY": "127.0.0.1",
                "HF_HUB_DISABLE_XET": "1",
                **env,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout.strip()

    return run


def test_files_are_downloaded_once_and_no_code_among_them(fetch: Fetch) -> None:
    folder = Path(fetch())
    assert {path.name for path in folder.rglob("*") if not path.is_dir()} == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not any("modeling" in path or ".bin" in path for path in Hub.asked)
    Hub.asked.clear()
    assert Path(fetch()) == folder
    assert not any("/resolve/" in path for path in Hub.asked)


def test_a_revision_and_a_token_are_sent(fetch: Fetch) -> None:
    assert Path(fetch(NAME, "v2")).name == OTHER_COMMIT
    assert fetch(NAME, "v3").endswith("it, but no revision 'v3' (--revision).")
    private = "some-one/private"
    assert "set HF_TOKEN to a token" in fetch(private)
    assert Path(fetch(private, HF_TOKEN=TOKEN)).name == COMMIT


def test_a_cached_model_is_found_where_the_hub_is_not(fetch: Fetch, hub_url: str) -> None:
    reason = fetch(HF_HUB_OFFLINE="1")
    assert reason.startswith(f"There is no folder {NAME} here, and it could not be had")
    assert f"`hf download {NAME}`" in reason and not Hub.asked
    folder = Path(fetch())
    Hub.asked.clear()
    assert Path(fetch(HF_HUB_OFFLINE="1")) == folder and not Hub.asked
    assert Path(fetch(HF_ENDPOINT="http://127.0.0.1:9")) == folder
    proxy = {"HTTPS_PROXY": hub_url, "NO_PROXY": "", "no_proxy": ""}
    assert Path(fetch(HF_ENDPOINT="https://hub.invalid", **proxy)) == folder
    assert any("hub.invalid" in path for path in Hub.asked)


def test_half_a_model_is_not_taken_for_one(fetch: Fetch) -> None:
    folder = Path(fetch(weights=False))
    assert not (folder / "model.safetensors").exists()
    assert "nor whole from the cache" in fetch(HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    ("text", "is_name"),
    [(NAME, True), ("a/b/c", False), ("/a/b", False), ("./a", False), ("gpt2", False)],
)
def test_names_are_told_from_folders(text: str, is_name: bool) -> None:
    assert hub.is_name(text) == is_name


def test_a_folder_that_is_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not hub.is_name(NAME)


def test_a_named_model_is_served_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fetch(name: str, revision: str | None, *, weights: bool) -> Path:
        seen.append((name, revision, weights))
        return reference_model.path()

    monkeypatch.setattr(hub, "fetch", fetch)
    config, launch = cli.with_model_files(EngineConfig(load=NAME), LaunchOptions(revision="v2"))
    assert config.load == str(reference_model.path()) and launch.served_model_name == (NAME,)
    dummy = config.replace(load=NAME, load_format="dummy")
    _, launch = cli.with_model_files(dummy, LaunchOptions(served_model_name=("mine", "yours")))
    assert launch.served_model_name == ("mine", "yours")
    assert seen == [(NAME, "v2", True), (NAME, None, False)]


def test_offline_a_model_goes_by_its_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fetch(name: str, revision: str | None, *, weights: bool) -> Path:
        seen.append((name, revision, weights))
        return reference_model.path()

    monkeypatch.setattr(hub, "fetch", fetch)
    llm = LLM(NAME, revision="v2", inference_max_seq_length=64)
    assert llm.config.load == str(reference_model.path()) and seen == [(NAME, "v2", True)]
    (out,) = llm.generate(["The cat"], SamplingParams(max_tokens=2), progress=False)
    assert out.token_ids
    with pytest.raises(ConfigurationError, match="--revision is v2, which is of a model on the"):
        LLM(str(reference_model.path()), revision="v2")


def test_a_model_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["somewhere", "--load", "elsewhere"]) == 2
    assert "Two models are named: somewhere, and elsewhere (--load)" in capsys.readouterr().err
    assert cli.main(["--port", "0", "somewhere", "--load", "somewhere"]) == 2
    assert "--load names somewhere, and there is no such folder" in capsys.readouterr().err


def test_a_revision_is_of_a_name() -> None:
    with pytest.raises(ConfigurationError, match="--revision is v2, which is of a model on the"):
        cli.with_model_files(EngineConfig(), LaunchOptions(revision="v2"))
