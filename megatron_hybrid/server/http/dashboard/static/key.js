// Asking for the API key, where the server wants one.

import { setKey, whenKeyIsWanted } from "./api.js";
import { byId } from "./elements.js";

/** `onKey()` is called after somebody gave a key. */
export function installKeyDialog(onKey) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  const error = byId("key-error");
  const button = byId("key-button");

  function open(message) {
    button.hidden = false;
    if (dialog.open) return;
    error.textContent = message;
    field.value = "";
    dialog.showModal();
    field.focus();
  }

  whenKeyIsWanted((hadKey) => open(hadKey ? "The server does not take that key." : ""));
  button.addEventListener("click", () => open(""));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const value = field.value.trim();
    // Headers carry nothing else; fetch would refuse them without saying why.
    if (!/^[\x21-\x7e]+$/.test(value)) {
      error.textContent = "A key has only letters, digits and signs of ASCII, and no spaces.";
      return;
    }
    setKey(value);
    dialog.close();
    onKey();
  });
}
