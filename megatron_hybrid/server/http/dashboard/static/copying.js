// Putting text on the clipboard.

import { element, setText } from "./elements.js";

const NEWS_MS = 2000;

/** A button that copies what `text()` gives. */
export function copyButton(text, label) {
  const button = element("button", { type: "button", class: "quiet small" }, label);
  button.addEventListener("click", async () => {
    setText(button, (await isCopied(text())) ? "Copied" : "Not copied");
    setTimeout(() => setText(button, label), NEWS_MS);
  });
  return button;
}

async function isCopied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return isCopiedTheOldWay(text); // a page without TLS, from another machine, has no clipboard
  }
}

function isCopiedTheOldWay(text) {
  document.addEventListener("copy", (event) => {
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  }, { once: true });
  return document.execCommand("copy");
}
