"""What Prometheus scrapes, what the page at / asks for, and the dashboard for Grafana."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from megatron_hybrid.cache import tier
from megatron_hybrid.cache.checkpoint_placement import KINDS
from megatron_hybrid.errors import WeightsError
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.metrics import PREFIX, ServerMetrics
from megatron_hybrid.server.link.messages import CacheSizes, EngineReady
from tests.engine.symbolic import generate, make_engine, random_tokens
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[3]
COMPLETION = "/v1/completions"
HELLO = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}

# Of the project's interfaces, as they are read by dashboards of other engines, too.
COUNTERS = """
    prefix_cache_queries prefix_cache_hits state_cache_queries state_cache_hits prompt_tokens
    prompt_tokens_cached generation_tokens num_preemptions request_success
    state_checkpoints_published state_checkpoints_read prefix_lost_tokens weight_updates
""".split()
GAUGES = """
    up num_requests_running num_requests_waiting kv_cache_usage_perc state_cache_usage_perc
""".split()
# Of GET /stats, for the page at /.
SHOWN = """
    kv_blocks kv_free kv_used kv_cached kv_evictable kv_cached_by_age state_slots state_free
    state_live state_used state_cached state_evictable state_cached_by_age requests_running
    requests_waiting requests_finished computed_tokens skipped_tokens lost_tokens generated_tokens
    latency iteration_tokens preemptions paused started
""".split()
HISTOGRAMS = """
    time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
    request_queue_time_seconds request_prefill_time_seconds iteration_tokens_total
""".split()


# As if there were memory of the host behind the device's.
TIERS = {name: {"host": 10 + i} for i, name in enumerate((*tier.COUNTERS, *tier.GAUGES))} | {
    "tier_refused": {"slower": 3, "device_full": 0}
}


# As if there were adapters: "b" is unloaded, and a request of its still runs.
ADAPTERS = {
    "lora_slots": 8,
    "lora_slots_used": 3,
    "lora_adapters": 2,
    "lora_requests": {"a": 5, "c": 0},
    "lora_requests_running": {"a": 2, "b": 1},
    "lora_requests_waiting": {"a": 1},
}


class Source:
    """An engine's client whose engine may be gone (`up`) or busy (`answers`)."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats
        self.up = self.answers = True
        self.ready: EngineReady | None = None

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        return {"0": {"status": "ok" if self.up else "down"}}

    def stats_by_engine(self) -> Mapping[str, Mapping[str, Any]]:
        return {"0": self._stats} if self.up and self.answers else {}


def parse(page: bytes | str) -> dict[str, Metric]:
    text = page.decode() if isinstance(page, bytes) else page
    families = text_string_to_metric_families(text)
    return {family.name.removeprefix(PREFIX): family for family in families}


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    name = family.name + suffix
    (found,) = [s.value for s in family.samples if s.name == name and s.labels == labels]
    return found


@pytest.fixture(scope="module")
def engine_stats() -> Mapping[str, Any]:
    """Of a real engine behind a symbolic model, after some requests."""
    engine = make_engine(exact_ends=True)
    prompt = random_tokens(5, 60)
    generate(engine, [prompt], max_tokens=6)
    generate(engine, [[*prompt, 3], prompt[:30]], max_tokens=3)
    # it came longer ago than the largest bound of its histogram
    engine.add_request("a", prompt, SamplingParams(max_tokens=5), arrived=time.monotonic() - 1e5)
    engine.abort("a")
    engine.step()
    engine.statistics.weight_bytes = {"bfloat16": 2**30}
    engine.statistics.start_seconds = {"imports": 2.5, "largest step": 0.5}
    return engine.stats() | TIERS | ADAPTERS


@pytest.fixture(scope="module")
def page(engine_stats: Mapping[str, Any]) -> dict[str, Metric]:
    return parse(ServerMetrics(Source(engine_stats)).page())


def test_every_metric_is_there_with_its_type(page: dict[str, Metric]) -> None:
    for names, kind in ((COUNTERS, "counter"), (GAUGES, "gauge"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert page[name].type == kind, name
            assert page[name].documentation, name


def test_the_engines_figures_are_on_the_page(
    page: dict[str, Metric], engine_stats: Mapping[str, Any]
) -> None:
    assert value(page["up"]) == 1
    assert value(page["start_seconds"], part="largest step") == 0.5
    assert value(page["generation_tokens"], "_total") == 6 + 3 + 3
    assert value(page["prompt_tokens"], "_total") == 60 + 61 + 30
    assert value(page["prompt_tokens_cached"], "_total") == engine_stats["skipped_tokens"] > 0
    done = {reason: 0 for reason in ("stop", "error")} | {"length": 3, "abort": 1}
    for reason, count in done.items():
        assert value(page["request_success"], "_total", finished_reason=reason) == count
    published = engine_stats["checkpoints_published"]
    assert published
    for kind in KINDS:
        count = published.get(kind, 0)
        assert value(page["state_checkpoints_published"], "_total", kind=kind) == count
    for metric, key in (
        ("kv_blocks_cached", "kv_cached_by_age"),
        ("state_slots_cached", "state_cached_by_age"),
    ):
        assert engine_stats[key][0][1] > 0
        for age, count in engine_stats[key]:
            assert value(page[metric], age=age) == count


def test_counters_by_label_are_0_from_the_start() -> None:
    engine = make_engine()
    page = parse(ServerMetrics(Source(engine.stats())).page())
    for name in COUNTERS:
        assert page[name].samples and all(sample.value == 0 for sample in page[name].samples), name
    prompt = random_tokens(5, 60)
    generate(engine, [prompt])
    generate(engine, [prompt[:37] + [1, 2, 3]])
    engine.add_request("a", prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
    engine.step()
    lost = engine.stats()["lost_tokens"]
    assert set(lost) == {"state_missing", "prompt_logprobs"}
    causes = {sample.labels["cause"] for sample in page["prefix_lost_tokens"].samples}
    assert set(lost) < causes


def test_histograms_are_cumulative_and_end_with_everything(page: dict[str, Metric]) -> None:
    counts = {}
    for name in HISTOGRAMS:
        buckets = [s for s in page[name].samples if s.name.endswith("_bucket")]
        bounds = [float(s.labels["le"]) for s in buckets]
        values = [s.value for s in buckets]
        assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf")
        assert values == sorted(values)
        counts[name] = value(page[name], "_count")
        assert values[-1] == counts[name]
        assert value(page[name], "_sum") > 0
    assert counts["time_to_first_token_seconds"] == 3
    assert counts["inter_token_latency_seconds"] == 5 + 2 + 2
    assert counts["e2e_request_latency_seconds"] == 4  # one of them aborted while it waited
    assert counts["request_queue_time_seconds"] == counts["request_prefill_time_seconds"] == 3


def test_without_an_engine_only_up_is_there_and_it_is_0(engine_stats: Mapping[str, Any]) -> None:
    source = Source(engine_stats)
    metrics = ServerMetrics(source)
    source.up = False
    down = parse(metrics.page())
    assert list(down) == ["up"] and value(down["up"]) == 0
    source.up = True
    assert value(parse(metrics.page())["up"]) == 1


def test_a_busy_engine_is_up_but_has_no_figures(engine_stats: Mapping[str, Any]) -> None:
    source = Source(engine_stats)
    source.answers = False
    busy = parse(ServerMetrics(source).page())
    assert list(busy) == ["up"] and value(busy["up"]) == 1


def test_how_the_cache_is_cut_stands_in_labels(engine_stats: Mapping[str, Any]) -> None:
    """vLLM's name and labels, which llm-d's endpoint picker reads."""
    source = Source(engine_stats)
    source.ready = EngineReady(100, 10, (), cache=CacheSizes(block_size=64))
    cut = parse(ServerMetrics(source).page())["cache_config_info"]
    blocks = str(engine_stats["kv_blocks"])
    assert value(cut, block_size="64", num_gpu_blocks=blocks) == 1


def test_adapters_are_on_the_page_by_their_names(page: dict[str, Metric]) -> None:
    """And in vLLM's words in one sample's labels, for the same picker."""
    assert [value(page[name]) for name in ("lora_slots", "lora_slots_used", "lora_adapters")] == [
        8, 3, 2,
    ]  # fmt: skip
    for name, suffix in (("", "_total"), ("_running", ""), ("_waiting", "")):
        samples = {s.labels["lora_name"]: s.value for s in page[f"lora_requests{name}"].samples}
        assert samples == ADAPTERS[f"lora_requests{name}"], suffix
    (info,) = page["lora_requests_info"].samples
    said = {"max_lora": "8", "running_lora_adapters": "a,c", "waiting_lora_adapters": ""}
    assert info.labels == said and abs(info.value - time.time()) < 600


def test_without_adapters_the_picker_finds_that_there_are_none() -> None:
    """A figure that is not there is an error to it."""
    page = parse(ServerMetrics(Source(FakeEngine(10, ()).stats() | {"lora_slots": 0})).page())
    labels = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert [sample.labels for sample in page["lora_requests_info"].samples] == [labels]
    assert not page["lora_requests"].samples


def test_updates_of_the_weights_are_counted_and_timed() -> None:
    """In pieces from the first one's beginning to the end."""
    now = [5.0]
    engine = make_engine(clock=lambda: now[0])
    with pytest.raises(WeightsError):
        engine.update_weights(WeightsError("does not fit"))  # type: ignore[arg-type]
    now[0] += 9
    engine.weights.begin()
    now[0] += 2
    engine.update_weights({})
    engine.weights.begin()
    now[0] += 3
    engine.weights.finish("named")
    now[0] += 9
    engine.update_weights({})
    page = parse(ServerMetrics(Source(engine.stats())).page())
    counts = {s.labels["outcome"]: s.value for s in page["weight_updates"].samples}
    assert counts == {"done": 2, "refused": 1, "lost": 0}
    assert value(page["weight_epoch"]) == 2
    seconds = page["weight_update_seconds"]
    assert value(seconds, "_count") == 2 and value(seconds, "_sum") == 5
    with pytest.raises(RuntimeError):
        engine.update_weights(RuntimeError("broke off"))  # type: ignore[arg-type]
    assert engine.stats()["weight_updates"] == {"done": 2, "refused": 1, "lost": 1}


# ------------------------------------------------------------- over HTTP


def test_memory_behind_the_devices_is_on_the_page_by_its_name(page: dict[str, Metric]) -> None:
    for names, suffix in ((tier.COUNTERS, "_total"), (tier.GAUGES, "")):
        for name in set(names) - {"tier_refused"}:
            assert value(page[name], suffix, tier="host") == TIERS[name]["host"]
    assert value(page["tier_refused"], "_total", reason="slower") == 3


def test_requests_over_http_are_counted_by_the_engine(http: FlaskClient) -> None:
    assert http.post(COMPLETION, json=HELLO).status_code == 200
    page = parse(http.get("/metrics").data)
    assert value(page["request_success"], "_total", finished_reason="length") == 1
    assert value(page["time_to_first_token_seconds"], "_count") == 1
    assert value(page["inter_token_latency_seconds"], "_count") == 4


def test_an_answer_that_a_stop_string_ends_counts_as_stopped(
    engine: FakeEngine, http: FlaskClient
) -> None:
    engine.step_seconds = 0.02  # else it may have said all 100 before it hears of the stop
    answer = http.post(COMPLETION, json={**HELLO, "stop": "l", "max_tokens": 100})
    assert answer.get_json()["choices"][0]["finish_reason"] == "stop"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # the engine hears of it after the client
        page = parse(http.get("/metrics").data)
        if value(page["request_success"], "_total", finished_reason="stop") == 1:
            break
    assert value(page["request_success"], "_total", finished_reason="stop") == 1
    assert value(page["request_success"], "_total", finished_reason="abort") == 0


def test_stats_has_what_the_page_shows(http: FlaskClient) -> None:
    before = time.time()
    http.post(COMPLETION, json=HELLO)
    answer = http.get("/stats").get_json()
    assert before <= answer["time"] <= time.time()
    assert answer["model"] == "fake" and 0 < answer["uptime"] < 600
    assert answer["engine"]["generated_tokens"] == 5
    first = answer["engine"]["latency"]["time_to_first_token_seconds"]
    assert first["count"] == 1 and 0 <= first["p50"] <= first["p95"]


def test_the_fake_engine_has_the_figures_of_the_real_one(engine_stats: Mapping[str, Any]) -> None:
    fake = FakeEngine(10, ()).stats()
    assert set(SHOWN) <= fake.keys() and set(SHOWN) <= engine_stats.keys()
    for key in ("latency", "kv_cached_by_age", "state_cached_by_age", "iteration_tokens"):
        assert _shape(fake[key]) == _shape(engine_stats[key])


def _shape(figures: Any) -> Any:
    """Names and lengths, without the numbers."""
    if isinstance(figures, Mapping):
        return {key: _shape(part) for key, part in figures.items()}
    return [part[0] for part in figures] if isinstance(figures, list) else None


# --------------------------------------------------------------- Grafana


@pytest.fixture(scope="module")
def grafana() -> dict[str, Any]:
    return json.loads((ROOT / "configs" / "grafana-dashboard.json").read_text())


def expressions(grafana: Mapping[str, Any]) -> Iterator[str]:
    for panel in grafana["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def sample_names(page: Mapping[str, Metric]) -> set[str]:
    return {sample.name for family in page.values() for sample in family.samples} | {
        f"{family.name}_total" for family in page.values() if family.type == "counter"
    }


def test_every_expression_names_metrics_that_exist(
    grafana: dict[str, Any], page: dict[str, Metric]
) -> None:
    known = sample_names(page)
    for expression in expressions(grafana):
        named = set(re.findall(rf"{PREFIX}\w+", expression))
        assert named and named <= known, expression
        assert expression.count("(") == expression.count(")")


def test_every_metric_has_a_panel(grafana: dict[str, Any], page: dict[str, Metric]) -> None:
    shown = " ".join(expressions(grafana))
    named = set(re.findall(rf"{PREFIX}(\w+)", shown))
    suffixes = ("_total", "_bucket", "_sum", "_count")
    for family in page:
        assert {family, *(family + suffix for suffix in suffixes)} & named, family


def test_panels_have_units_the_chosen_data_source_and_places_of_their_own(
    grafana: dict[str, Any],
) -> None:
    assert grafana["templating"]["list"][0]["type"] == "datasource"
    taken: set[tuple[int, int]] = set()
    panels = grafana["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"])
