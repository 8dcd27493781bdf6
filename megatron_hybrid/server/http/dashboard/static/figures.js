// The live picture of the cache: asks for the figures every second and shows them.

import { ApiError, call } from "./api.js";
import { StackedBar } from "./bars.js";
import { RateChart } from "./chart.js";
import { byId, element, setText } from "./elements.js";
import { compact, duration, percent, rate, whole } from "./format.js";
import { blocks, latency, slots } from "./occupancy.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const NEWS_MS = 6000; // how long "the cache is empty now" is news
const LONGEST_GAP_SECONDS = 5; // after a longer one a rate would be an average over the gap

const DONE = "The cache is empty now.";

const TILES = [
  ["skipped", "prompts skipped"],
  ["running", "running"],
  ["waiting", "waiting"],
  ["first", "first token (p50)"],
  ["between", "inter-token (p50)"],
  ["generated", "tokens/s out"],
];
const CAUSES = {
  state_missing: "no state was kept that far",
  state_evicted: "its state had to go",
  grid: "behind the last grid position",
  prompt_logprobs: "log-probabilities wanted",
};

class Figures {
  constructor() {
    this.timer = null;
    this.isAsking = false;
    this.isWantedAgain = false; // somebody asked for a poll during one
    this.earlier = null; // the figures before these, for rates
    this.isKeyWanted = false;
    this.failed = false; // the last time
    this.tiles = new Map(TILES.map(([name]) => [name, element("dd", { id: `tile-${name}` }, "–")]));
    byId("tiles").append(...TILES.map(([name, label]) =>
      element("div", {}, element("dt", {}, label), this.tiles.get(name))));
    this.kv = new StackedBar(byId("kv"), "KV blocks");
    this.state = new StackedBar(byId("state"), "State slots");
    this.prefill = new RateChart(byId("prefill"), [
      { key: "computed", label: "computed", kind: "computed" },
      { key: "skipped", label: "skipped", kind: "cached-0" },
    ]);
    this.showLost({});
    byId("reset").addEventListener("click", () => this.reset());
    document.addEventListener("visibilitychange", () => this.poll());
    this.poll();
  }

  /** Ask now, and from then on every second while somebody can see it. */
  async poll() {
    clearTimeout(this.timer);
    // What is on its way may carry the key before the one just given: one more after it.
    if (this.isAsking) this.isWantedAgain = true;
    if (document.hidden || this.isAsking) return;
    this.isAsking = true;
    this.isWantedAgain = false;
    this.isKeyWanted = false;
    try {
      const response = await call("stats", { signal: AbortSignal.timeout(PATIENCE_MS) });
      this.show(await response.json());
    } catch (error) {
      this.showFailure(error);
    } finally {
      this.isAsking = false;
    }
    if (this.isWantedAgain) this.poll();
    else if (!this.isKeyWanted) this.timer = setTimeout(() => this.poll(), EVERY_MS);
  }

  show(answer) {
    const engine = answer.engine ?? {};
    setText(byId("model"), answer.model ?? "");
    if (engine.paused) showConnection("paused", "engine paused");
    else showConnection("live", "live");
    if (this.failed) setText(byId("notice"), "");
    this.failed = false;
    byId("cache").classList.remove("stale");
    this.showOccupancy(engine);
    this.showRates({ ...engine, time: answer.time ?? performance.now() / 1000 });
    this.showLost(engine.lost_tokens ?? {});
    const { computed_tokens: computed, skipped_tokens: skipped } = engine;
    this.tile("skipped", percent(skipped, computed + skipped));
    this.tile("running", whole(engine.requests_running));
    this.tile("waiting", whole(engine.requests_waiting));
    this.tile("first", duration(latency(engine, "time_to_first_token")));
    this.tile("between", duration(latency(engine, "inter_token_latency")));
  }

  showOccupancy(engine) {
    const kv = blocks(engine);
    const state = slots(engine);
    setText(byId("kv-total"), engine.kv_blocks === undefined ? "" : whole(engine.kv_blocks));
    setText(byId("state-total"), engine.state_slots === undefined ? "" : whole(engine.state_slots));
    this.kv.show(kv);
    this.state.show(state);
  }

  showRates(now) {
    const before = this.earlier;
    this.earlier = now;
    if (!before) return;
    const seconds = now.time - before.time;
    // A restarted engine counts from zero again.
    const restarted = now.generated_tokens < before.generated_tokens
      || now.computed_tokens < before.computed_tokens;
    if (!(seconds > 0) || seconds > LONGEST_GAP_SECONDS || restarted) return;
    const grown = (name) => Math.max(0, (now[name] - before[name]) / seconds || 0);
    this.tile("generated", rate(grown("generated_tokens")));
    this.prefill.add({
      time: now.time, computed: grown("computed_tokens"), skipped: grown("skipped_tokens"),
    });
  }

  showLost(lost) {
    const counts = { ...Object.fromEntries(Object.keys(CAUSES).map((cause) => [cause, 0])), ...lost };
    const most = Math.max(1, ...Object.values(counts));
    const rows = Object.entries(counts).map(([cause, count]) => {
      const bar = element("span", { class: "lost-bar" });
      bar.style.width = `${(100 * count) / most}%`;
      return element("div", { class: count ? "" : "none" },
        element("dt", {}, CAUSES[cause] ?? cause.replaceAll("_", " ")),
        element("dd", {}, element("span", { class: "lost-track", "aria-hidden": "true" }, bar),
          element("b", {}, compact(count))));
    });
    byId("lost").replaceChildren(...rows);
  }

  showFailure(error) {
    byId("cache").classList.add("stale");
    this.failed = true;
    this.earlier = null;
    const status = error instanceof ApiError ? error.status : 0;
    if (status === 401) {
      this.isKeyWanted = true;
      showConnection("down", "key needed");
    } else if (status === 503) {
      showConnection("down", "engine down");
    } else if (status === 0) {
      showConnection("down", "no connection");
    } else {
      showConnection("down", "no figures");
    }
    setText(byId("notice"), error instanceof ApiError ? error.message
      : "The server takes too long to answer.");
  }

  async reset() {
    const button = byId("reset");
    button.disabled = true;
    try {
      await call("reset_prefix_cache", { method: "POST" });
      setText(byId("notice"), DONE);
      setTimeout(() => {
        if (byId("notice").textContent === DONE) setText(byId("notice"), "");
      }, NEWS_MS);
    } catch (error) {
      setText(byId("notice"), `The cache was not emptied. ${error.message}`);
    }
    button.disabled = false;
    button.focus();
    this.poll();
  }

  tile(name, text) {
    setText(this.tiles.get(name), text);
  }
}

function showConnection(state, text) {
  const pill = byId("connection");
  pill.dataset.state = state;
  setText(pill, text);
}

export const installFigures = () => new Figures();
