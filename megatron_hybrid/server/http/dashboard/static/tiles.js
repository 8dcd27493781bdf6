// The six figures at the top, three of them with the last minute beside the whole time.

import { element, setText } from "./elements.js";
import { explained } from "./explain.js";
import { TILES } from "./explanations.js";
import { duration, percent, rate, whole } from "./format.js";
import { LastMinute } from "./recent.js";

const LABELS = {
  skipped: "prompts skipped",
  running: "running",
  waiting: "waiting",
  first: "first token (p50)",
  between: "inter-token (p50)",
  generated: "tokens/s out",
};
const LATENCIES = { first: "time_to_first_token_seconds", between: "inter_token_latency_seconds" };

export class Tiles {
  constructor(container) {
    this.figures = {};
    this.recent = {};
    this.lastMinute = new LastMinute();
    for (const [name, label] of Object.entries(LABELS)) {
      this.figures[name] = element("dd", { id: `tile-${name}` }, "–");
      this.recent[name] = element("dd", { id: `recent-${name}`, class: "recent" });
      container.append(element("div", {},
        element("dt", {}, explained(label, TILES[name])), this.figures[name], this.recent[name]));
    }
  }

  /** engine: its figures, and `time` in seconds. */
  show(engine) {
    const { computed_tokens: computed, skipped_tokens: skipped } = engine;
    this.set("skipped", percent(skipped, computed + skipped));
    this.set("running", whole(engine.requests_running));
    this.set("waiting", whole(engine.requests_waiting));
    const { lastMinute } = this;
    lastMinute.add(engine);
    const grown = lastMinute.grown("skipped_tokens");
    this.setRecent("skipped", percent(grown, grown + lastMinute.grown("computed_tokens")));
    for (const [name, latency] of Object.entries(LATENCIES)) {
      const observed = engine.latency?.[latency];
      this.set(name, duration(observed?.count > 0 ? observed.p50 : undefined));
      this.setRecent(name, duration(lastMinute.median(latency)));
    }
  }

  showRate(tokensPerSecond) {
    this.set("generated", rate(tokensPerSecond));
  }

  set(name, text) {
    setText(this.figures[name], text);
  }

  setRecent(name, text) {
    setText(this.recent[name], `last min ${text}`);
  }
}
