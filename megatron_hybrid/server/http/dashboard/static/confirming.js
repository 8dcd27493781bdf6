// A button for what cannot be undone: it asks, and does it only when it is pressed again.

import { setText } from "./elements.js";

export function onSecondClick(button, question, action) {
  const label = button.textContent;
  let isAsked = false;
  const ask = (asked) => {
    isAsked = asked;
    setText(button, asked ? question : label);
  };
  button.addEventListener("click", () => {
    const isSure = isAsked;
    ask(!isSure);
    if (isSure) action();
  });
  button.addEventListener("blur", () => ask(false));
}
