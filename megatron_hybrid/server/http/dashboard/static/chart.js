// Two rates over the last two minutes, stacked, a column for each sample.

import { element, setText } from "./elements.js";
import { explained } from "./explain.js";
import { compact, rate } from "./format.js";

const SECONDS = 120;
const HEIGHT = 100; // in the drawing's own units; it is stretched to the space there is
const COLUMN_SECONDS = 0.8; // of each second: the rest is the gap between columns
const SVG = "http://www.w3.org/2000/svg";

export class RateChart {
  /** series: two [{ key, label, kind, means }], the lower one first. */
  constructor(container, series) {
    this.series = series;
    this.samples = []; // { time, [key]: rate }, oldest first
    this.top = element("span", {});
    const svg = drawing("svg", {
      viewBox: `0 0 ${SECONDS} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    });
    this.svg = svg;
    svg.append(...[0, 0.5, 1].map((share) => drawing("line", {
      class: "grid", x1: 0, x2: SECONDS, y1: share * HEIGHT, y2: share * HEIGHT,
    })));
    this.paths = series.map(({ kind }) => drawing("path", { class: kind }));
    svg.append(...this.paths);
    this.when = element("span", { class: "muted" });
    this.numbers = series.map(() => element("b", {}));
    const legend = element("ul", { class: "legend rates" },
      ...series.map(({ label, kind, means }, i) => element("li", {},
        element("i", { class: `key ${kind}`, "aria-hidden": "true" }),
        explained(label, means), this.numbers[i])),
      element("li", { class: "when" }, this.when));
    container.append(
      element("div", { class: "chart" },
        element("div", { class: "scale", "aria-hidden": "true" }, this.top, element("span", {}, "0")),
        svg),
      element("div", { class: "times", "aria-hidden": "true" },
        element("span", {}, "2 min ago"), element("span", {}, "now")),
      legend);
    this.pointed = null; // seconds before now, under the pointer
    svg.addEventListener("pointermove", (event) => {
      const { left, width } = svg.getBoundingClientRect();
      this.pointed = SECONDS * (1 - (event.clientX - left) / width);
      this.showNumbers();
    });
    svg.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.showNumbers();
    });
    this.draw();
  }

  add(sample) {
    this.samples.push(sample);
    this.samples = this.samples.filter(({ time }) => time > sample.time - SECONDS);
    this.draw();
  }

  draw() {
    const height = (sample) => this.series.reduce((sum, { key }) => sum + sample[key], 0);
    const top = roundUp(Math.max(10, ...this.samples.map(height)));
    setText(this.top, compact(top));
    const now = this.samples.at(-1)?.time ?? 0;
    const columns = this.series.map(() => "");
    for (const sample of this.samples) {
      const right = SECONDS - (now - sample.time);
      let base = HEIGHT;
      this.series.forEach(({ key }, i) => {
        const tall = (HEIGHT * sample[key]) / top;
        if (tall > 0) {
          columns[i] += `M${right.toFixed(2)} ${base.toFixed(2)}v${(-tall).toFixed(2)}`
            + `h${-COLUMN_SECONDS}v${tall.toFixed(2)}z`;
        }
        base -= tall;
      });
    }
    columns.forEach((path, i) => this.paths[i].setAttribute("d", path));
    this.showNumbers();
  }

  showNumbers() {
    const newest = this.samples.at(-1);
    let shown = newest;
    if (newest && this.pointed !== null) {
      const away = ({ time }) => Math.abs(newest.time - this.pointed - time);
      shown = this.samples.reduce((best, sample) => (away(sample) < away(best) ? sample : best));
    }
    const ago = shown ? Math.round(newest.time - shown.time) : 0;
    setText(this.when, ago > 0 ? `${ago} s ago` : "now");
    const numbers = this.series.map(({ key }) => rate(shown?.[key] ?? 0));
    numbers.forEach((number, i) => setText(this.numbers[i], number));
    this.svg.setAttribute("aria-label", "Prefill over the last two minutes; "
      + this.series.map(({ label }, i) => `${label} ${numbers[i]} tokens a second`).join(", "));
  }
}

/** The next of 1, 2 and 5 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value);
}

function drawing(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
