// The settings of a chat: the form's fields, and what requests have of them.

import { call } from "./api.js";
import { byId, setText } from "./elements.js";

const OWN = ["messages", "model", "n", "stream", "stream_options"]; // the page says these itself

/** What a field's text means; throws Error with a sentence for the person. */
const READERS = {
  number: Number,
  choice: (text) => ({ true: true, false: false })[text] ?? text,
  lines: (text) => text.split("\n").filter((line) => line !== ""),
  schema: (text) => json(text, isObject, "A JSON schema is an object: {...}."),
  tools: (text) => json(text, Array.isArray, "Tools are a list of functions: [...].").map(asTool),
  more: (text) => {
    const fields = json(text, isObject, 'Other fields are an object: {"min_tokens": 5}.');
    const own = OWN.find((name) => name in fields);
    if (own) throw new Error(`The page itself says ${own}.`);
    return fields;
  },
};

export class Settings {
  constructor() {
    this.box = document.querySelector(".settings");
    this.fields = [...this.box.querySelectorAll("[name]")];
    for (const field of this.fields) {
      field.addEventListener("input", () => this.check(field));
    }
    byId("settings-reset").addEventListener("click", () => this.restore({}));
    this.box.addEventListener("toggle", () => this.describe(), { once: true });
    this.showSummary();
  }

  check(field) {
    field.setCustomValidity("");
    try {
      if (field.value.trim() !== "") read(field);
    } catch (error) {
      field.setCustomValidity(error.message);
    }
    this.showSummary();
  }

  /** Whether all can be sent; if not, the browser says what is wrong with which. */
  areValid() {
    const wrong = this.fields.find((field) => !field.validity.valid);
    if (!wrong) return true;
    this.box.open = true;
    wrong.reportValidity();
    return false;
  }

  /** The texts of the fields that are not empty, by name. */
  values() {
    return Object.fromEntries(this.filled().map(({ name, value }) => [name, value]));
  }

  filled() {
    return this.fields.filter(({ value }) => value.trim() !== "");
  }

  restore(values) {
    for (const field of this.fields) {
      field.value = values[field.name] ?? "";
      this.check(field);
    }
  }

  /** { system, fields }: the system prompt, and a request's fields; what is empty is left out. */
  request() {
    const { system = "", schema, more, ...fields } = Object.fromEntries(
      this.filled().map((field) => [field.name, read(field)]));
    if (schema) {
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    return { system, fields: { ...fields, ...more } };
  }

  showSummary() {
    const names = this.filled().map((field) => {
      const label = field.labels[0].firstChild.textContent.trim();
      return field.type === "number" ? `${label} ${field.value}` : label;
    });
    setText(byId("settings-summary"), names.join(" · ") || "the server's own");
  }

  /** Limits, and what the server does with an empty field, from its description of itself. */
  async describe() {
    try {
      const description = await (await call("openapi.json")).json();
      const known = description.components.schemas.ChatRequest.properties;
      for (const field of this.fields) describeField(field, known[field.name] ?? {});
    } catch {
      // The server checks what is sent, too.
    }
  }
}

function describeField(field, { description, minimum, maximum, default: value }) {
  if (description) field.labels[0].title = description;
  if (field.type !== "number") return;
  if (minimum !== undefined) field.min = minimum;
  if (maximum !== undefined) field.max = maximum;
  if (value !== undefined && value !== null) field.placeholder = `${value} by default`;
}

function read(field) {
  const reader = READERS[field.dataset.kind ?? field.type];
  return reader ? reader(field.value) : field.value;
}

function json(text, isRight, otherwise) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (!isRight(value)) throw new Error(otherwise);
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** OpenAI's frame around a function, where it is left out. */
function asTool(tool) {
  return isObject(tool) && "function" in tool ? tool : { type: "function", function: tool };
}
