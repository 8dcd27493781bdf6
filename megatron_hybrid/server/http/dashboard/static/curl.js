// The command that sends a turn's request again.

import { hasKey } from "./api.js";
import { codeBlock } from "./code.js";
import { byId } from "./elements.js";
import { curlCommand } from "./messages.js";

/** A function that shows the command for a body. */
export function installCurl() {
  const dialog = byId("curl-dialog");
  byId("curl-close").addEventListener("click", () => dialog.close());
  return (body) => {
    const address = new URL("v1/chat/completions", document.baseURI).href;
    byId("curl-command").replaceChildren(codeBlock(curlCommand(address, body, hasKey()), "bash"));
    dialog.showModal();
  };
}
