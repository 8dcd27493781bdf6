// A bar in parts, with the parts' names and numbers below it.

import { element, setText } from "./elements.js";
import { explained } from "./explain.js";
import { percent, whole } from "./format.js";

export class StackedBar {
  /** `name`: what the whole is, for those who do not see it. */
  constructor(container, name) {
    this.name = name;
    this.bar = element("div", { class: "stacked", role: "img" });
    this.legend = element("ul", { class: "legend" });
    this.parts = new Map();
    container.append(this.bar, this.legend);
  }

  /** parts: [{ label, kind, count, means }], in order; `kind` names the colour in style.css. */
  show(parts) {
    const total = parts.reduce((sum, part) => sum + part.count, 0);
    if (!sameNames(parts, this.parts)) this.build(parts);
    for (const { label, count } of parts) {
      const { piece, number } = this.parts.get(label);
      piece.style.flexGrow = String(count);
      piece.classList.toggle("empty", count === 0);
      setText(number, whole(count));
    }
    this.bar.setAttribute("aria-label", `${this.name}: ` + parts
      .map(({ label, count }) => `${label} ${whole(count)} (${percent(count, total)})`).join(", "));
  }

  build(parts) {
    this.parts = new Map(parts.map(({ label, kind, means }) => [label, {
      piece: element("span", { class: `piece ${kind}` }),
      number: element("b", {}),
      name: explained(label, means),
      key: element("i", { class: `key ${kind}`, "aria-hidden": "true" }),
    }]));
    this.bar.replaceChildren(...[...this.parts.values()].map(({ piece }) => piece));
    this.legend.replaceChildren(...[...this.parts.values()].map(({ key, name, number }) =>
      element("li", {}, key, name, number)));
  }
}

function sameNames(parts, known) {
  return parts.length === known.size && parts.every(({ label }) => known.has(label));
}
