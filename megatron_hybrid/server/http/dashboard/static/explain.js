// What a figure means, in a box beside it: on hover, on focus, and said by screen readers.

import { byId, element, setText } from "./elements.js";

const GAP_PIXELS = 6;

const descriptions = element("div", { hidden: "" });
const box = element("div", { class: "tip", popover: "manual", "aria-hidden": "true" });
let shown = null; // the label whose explanation is there

/** A label that explains itself; whoever points at its whole row points at it (style.css). */
export function explained(label, text) {
  return element("button",
    { type: "button", class: "explained", "aria-describedby": describe(text) }, label);
}

/** The id of an element with this text. */
function describe(text) {
  let description = [...descriptions.children].find((one) => one.textContent === text);
  if (!description) {
    description = element("p", { id: `explanation-${descriptions.childElementCount}` }, text);
    descriptions.append(description);
  }
  return description.id;
}

export function installExplanations() {
  document.body.append(descriptions, box);
  document.addEventListener("focusin", ({ target }) => show(labelAt(target)));
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("pointerover", ({ target }) => {
    if (!box.contains(target)) show(labelAt(target) ?? labelAt(document.activeElement));
  });
  document.addEventListener("scroll", ({ target }) => {
    if (target.contains(shown)) place(shown); // also when Tab leads to a label out of sight
  }, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(null);
  });
}

const labelAt = (node) => node?.closest?.(".explained") ?? null;

function show(label) {
  if (label === shown) return;
  shown = label;
  if (!label) {
    box.hidePopover();
    return;
  }
  setText(box, byId(label.getAttribute("aria-describedby")).textContent);
  box.showPopover();
  place(label);
}

/** Below the label, or above it where there is no room below. */
function place(label) {
  const { left, top, bottom } = label.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const below = bottom + GAP_PIXELS;
  const fits = below + height <= innerHeight;
  box.style.top = `${fits ? below : Math.max(0, top - GAP_PIXELS - height)}px`;
  box.style.left = `${Math.max(0, Math.min(left, document.documentElement.clientWidth - width))}px`;
}
