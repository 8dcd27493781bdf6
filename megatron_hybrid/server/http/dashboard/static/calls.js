// Calls of tools in an answer, and the results that people give back.

import { codeBlock } from "./code.js";
import { element } from "./elements.js";

/** Add the pieces of a stream's delta to calls: the first of each has its id and name. */
export function addCallPieces(calls, pieces) {
  for (const { index, id, function: called } of pieces) {
    calls[index] ??= { id: "", name: "", arguments: "", result: "" };
    calls[index].id ||= id ?? "";
    calls[index].name ||= called?.name ?? "";
    calls[index].arguments += called?.arguments ?? "";
  }
}

/** The calls of a turn, in a form that gives their results back with onResults(). */
export class CallsView {
  constructor(calls, onResults) {
    this.calls = calls;
    this.fields = [];
    this.button = element("button", { type: "submit", class: "small" }, "Give results back");
    this.element = element("form", { class: "calls", hidden: "" });
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults();
    });
  }

  /** While they come, without a place for results. */
  show() {
    this.element.hidden = this.calls.length === 0;
    this.element.replaceChildren(...this.calls.map((one) => frame(one, one.arguments)));
  }

  finish() {
    this.element.hidden = this.calls.length === 0;
    this.fields = this.calls.map((one) => {
      const field = element("textarea", { rows: 2, placeholder: "What came of it, as text or JSON" });
      field.value = one.result;
      field.addEventListener("input", () => {
        one.result = field.value;
      });
      return field;
    });
    this.element.replaceChildren(
      ...this.calls.map((one, i) => frame(one, indented(one.arguments),
        element("label", {}, `Result of ${one.name}`, this.fields[i]))),
      this.button);
  }

  /** Only of the last turn: another one has been gone on from. */
  allowResults(allowed) {
    this.button.hidden = !allowed;
    for (const field of this.fields) field.readOnly = !allowed;
  }
}

function frame({ name }, given, ...more) {
  return element("div", { class: "call" },
    element("p", {}, "Calls ", element("strong", {}, name)), codeBlock(given, "json"), ...more);
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // cut off
  }
}
