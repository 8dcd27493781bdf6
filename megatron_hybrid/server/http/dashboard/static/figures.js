// The live picture of the cache: asks for the figures every second and shows them.

import { ApiError, call } from "./api.js";
import { StackedBar } from "./bars.js";
import { RateChart } from "./chart.js";
import { byId, element, setText } from "./elements.js";
import { explained } from "./explain.js";
import { LOST, PREFILL } from "./explanations.js";
import { compact, whole } from "./format.js";
import { blocks, files, host, slots } from "./occupancy.js";
import { Tiles } from "./tiles.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const NEWS_MS = 6000; // how long "the cache is empty now" is news
const LONGEST_GAP_SECONDS = 5; // after a longer one a rate would be an average over the gap

const DONE = "The cache is empty now.";

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
    this.lost = new Map(); // rows by cause
    this.tiles = new Tiles(byId("tiles"));
    this.kv = new StackedBar(byId("kv"), "KV blocks");
    this.state = new StackedBar(byId("state"), "State slots");
    this.host = new StackedBar(byId("host"), "Memory of the host, MB");
    this.files = new StackedBar(byId("files"), "Files, MB");
    this.prefill = new RateChart(byId("prefill"), [
      { key: "computed", label: "computed", kind: "computed", means: PREFILL.computed },
      { key: "skipped", label: "skipped", kind: "cached-0", means: PREFILL.skipped },
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
    const timed = { ...engine, time: answer.time ?? performance.now() / 1000 };
    this.tiles.show(timed);
    this.showRates(timed);
    this.showLost(engine.lost_tokens ?? {});
  }

  showOccupancy(engine) {
    const kv = blocks(engine);
    const state = slots(engine);
    setText(byId("kv-total"), engine.kv_blocks === undefined ? "" : whole(engine.kv_blocks));
    setText(byId("state-total"), engine.state_slots === undefined ? "" : whole(engine.state_slots));
    this.showTier("host", host(engine));
    this.showTier("files", files(engine));
    this.kv.show(kv);
    this.state.show(state);
  }

  showTier(name, parts) {
    byId(`${name}-part`).hidden = parts.length === 0;
    if (parts.length > 0) this[name].show(parts);
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
    this.tiles.showRate(grown("generated_tokens"));
    this.prefill.add({
      time: now.time, computed: grown("computed_tokens"), skipped: grown("skipped_tokens"),
    });
  }

  showLost(lost) {
    const counts = { ...Object.fromEntries(Object.keys(CAUSES).map((cause) => [cause, 0])), ...lost };
    const most = Math.max(1, ...Object.values(counts));
    for (const [cause, count] of Object.entries(counts)) {
      const { row, bar, number } = this.lostRow(cause);
      row.classList.toggle("none", count === 0);
      bar.style.width = `${(100 * count) / most}%`;
      setText(number, compact(count));
    }
  }

  /** Made once: whoever has its label in focus keeps it. */
  lostRow(cause) {
    if (!this.lost.has(cause)) {
      const label = CAUSES[cause] ?? cause.replaceAll("_", " ");
      const bar = element("span", { class: "lost-bar" });
      const number = element("b", {});
      const row = element("div", {},
        element("dt", {}, cause in LOST ? explained(label, LOST[cause]) : label),
        element("dd", {},
          element("span", { class: "lost-track", "aria-hidden": "true" }, bar), number));
      byId("lost").append(row);
      this.lost.set(cause, { row, bar, number });
    }
    return this.lost.get(cause);
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
}

function showConnection(state, text) {
  const pill = byId("connection");
  pill.dataset.state = state;
  setText(pill, text);
}

export const installFigures = () => new Figures();
