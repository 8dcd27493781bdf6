"""Figures of other engines: what a file has to hold, and how they stand beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peers import Compared, Peer, PeersError, load_peers, peers_of, summary_head, summary_row
from bench.plots import plot_workloads
from simulation.plots import load_matplotlib

DOCS = Path(__file__).parents[3] / "docs"
FAST = Peer("fast", "", {"m": {"fork": {"off": {"wall_s": 4.0}, "on": {"wall_s": 2.0}}}})
SLOW = Peer("slow", "", {"m": {"unique": {"on": {"wall_s": 8.0}}}})
OURS = {
    "workload": "fork",
    "wall_s": 3.0,
    "walls_s": [2.9, 3.0],
    "requests": 4,
    "output_tokens": 8,
    "output_tok_s": 8 / 3,
    "prompt_tok_s": 1000.0,
    "cached_tokens": 5,
    "computed_tokens": 7,
    "ttft_s": {"mean": 1.0, "p95": 2.0},
    "steady_itl_ms": {"mean": 6.0},
    "rounds": [{"ttft_s": {"mean": 1.0}}, {"ttft_s": {"mean": 0.25}}],
}


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_peers_that_ship_are_read():
    peers = {peer.name: peer for peer in load_peers(DOCS / "peers.json")}
    assert len(peers) == 4 and all(peer.source for peer in peers.values())
    # Of the table of what was measured beside Nemotron-H-8B.
    best = {
        name: [peer.best("nemotron-h-8b", workload) for workload in ("unique", "decode_256")]
        for name, peer in peers.items()
    }
    texts = {name: [one and one[1].text for one in found] for name, found in best.items()}
    assert texts == {
        "vLLM 0.26.0": ["8.05 s", "22.90 ms"],
        "vLLM 0.26.0 fp8": ["5.98 s", "21.24 ms"],
        "megatron-core 0.19.2": ["9.88 s", "57.50 ms"],
        "vLLM, published": [None, None],
    }
    published = peers["vLLM, published"].best("qwen3.5-35b-a3b", "prompts_20k")
    assert published == ("flashinfer", Compared(1 / 54800, "54,800 tok/s"))


@pytest.mark.parametrize(
    ("workload", "seconds", "text"),
    [
        ("fork", 3.0, "3.00 s"),
        ("decode_32", 0.006, "6.00 ms"),
        ("prompts_8k", 0.001, "1,000 tok/s"),
        ("prompt_65k", 0.001, "1,000 tok/s"),
        ("long_resume", 0.25, "250 ms"),
    ],
)
def test_a_workload_is_compared_by_what_it_shows(workload, seconds, text):
    assert Compared.of(workload, OURS) == Compared(seconds, text)


def test_every_peer_has_a_column_with_its_best_mode():
    peers = [FAST, SLOW]
    head, line = map(cells, summary_head(peers).splitlines())
    row = cells(summary_row(OURS, peers, "m"))
    assert len(head) == len(line) == len(row) == 8
    assert head[6:] == ["fast (mode), ours / it", "slow (mode), ours / it"]
    assert row[6:] == ["2.00 s (on), 1.500", ""]


def test_without_peers_there_are_six_columns():
    head, line = map(cells, summary_head().splitlines())
    assert len(head) == len(line) == len(cells(summary_row(OURS))) == 6


def test_answers_of_one_token_show_the_speed_of_prompts():
    assert cells(summary_row(OURS))[2] == "3"
    one_token = OURS | {"output_tokens": 4, "steady_itl_ms": {}}
    assert cells(summary_row(one_token))[2:6:3] == ["1000 in", ""]


def test_only_peers_that_ran_the_model_are_shown():
    other = Peer("other", "", {"n": {}})
    assert peers_of([FAST, other], "m") == [FAST]


def test_a_plot_has_bars_of_every_peer_and_panels_of_what_was_measured(tmp_path, monkeypatch):
    pyplot, drawn = load_matplotlib(), []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    prompts = OURS | {"workload": "prompts_8k", "steady_itl_ms": {}}
    plot_workloads([OURS, prompts], "m", [FAST, SLOW], tmp_path / "plot.png", "title")
    (figure,) = drawn
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "wall time, s",
        "time to first token, mean, s",
        "steady time between tokens, mean, ms",
        "prompt tokens a second",
    ]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    # SLOW did not run these workloads.
    assert legend == ["megatron-hybrid", "fast, off", "fast, on"]
    walls, _, steady, rates = ([bar.get_height() for bar in axis.patches] for axis in figure.axes)
    assert walls == [3.0, 3.0, 4.0, 2.0] and steady == [6.0] and rates == [1000.0]

    decode = OURS | {"workload": "unique"}
    plot_workloads([OURS, decode], "m", [FAST, SLOW], tmp_path / "plot.png", "title")
    legend = [text.get_text() for text in drawn[1].axes[0].get_legend().get_texts()]
    assert legend == ["megatron-hybrid", "fast, off", "fast, on", "slow, on"]
    assert len(drawn[1].axes) == 3


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"peer": "x", "source": "", "models": {}}',
        '{"peers": [{"name": "x", "models": {}}]}',
        # no wall time; no first token of a second round
        '{"peers": [{"name": "x", "source": "", "models": {"m": {"fork": {"on": {}}}}}]}',
        '{"peers": [{"name": "x", "source": "", "models": '
        '{"m": {"long_resume": {"on": {"rounds": []}}}}}]}',
    ],
)
def test_a_file_that_is_no_table_of_peers_is_refused(tmp_path, content):
    path = tmp_path / "peers.json"
    path.write_text(content)
    with pytest.raises(PeersError, match=r"docs/peers\.json is one"):
        load_peers(path)


def test_a_mode_without_the_figure_that_is_compared_is_named(tmp_path):
    models = {"m": {"decode_1": {"on": {"wall_s": 1.0}}}}
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"peers": [{"name": "x", "source": "", "models": models}]}))
    with pytest.raises(PeersError, match="steady_itl_ms"):
        load_peers(path)
