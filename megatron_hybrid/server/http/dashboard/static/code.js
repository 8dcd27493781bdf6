// Blocks of code: their language, colours, and a button that copies them.

import { copyButton } from "./copying.js";
import { element } from "./elements.js";
import { purified } from "./purified.js";
import highlighter from "./vendor/highlight.min.js";

const LONGEST_COLOURED = 50_000; // characters: more would hold up the page

/** A framed block of code. */
export function codeBlock(text, language) {
  const code = element("code", { class: `language-${language}` }, text);
  const pre = element("pre", {}, code);
  const box = element("div", {}, pre);
  decorateCode(code, true);
  return box.firstChild;
}

/** Frame a <pre><code>; one that has not ended has neither colours nor a button. */
export function decorateCode(code, hasEnded) {
  const language = /(?:^| )language-(\S+)/.exec(code.className)?.[1] ?? "";
  const pre = code.parentElement;
  pre.tabIndex = 0; // so that its far end is reached by keyboard
  const head = element("div", { class: "code-head" }, element("span", {}, language));
  const frame = element("div", { class: "code" }, head);
  pre.replaceWith(frame);
  frame.append(pre);
  if (!hasEnded) return;
  const text = code.textContent;
  head.append(copyButton(() => text, "Copy code"));
  if (highlighter.getLanguage(language) && text.length <= LONGEST_COLOURED) {
    const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(purified(value, ["span"], ["class"]));
  }
}
