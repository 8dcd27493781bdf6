// What can be done with one chat: a name, a file of it, its end.

import { onSecondClick } from "./confirming.js";
import { byId } from "./elements.js";
import { saveAsJson, saveAsMarkdown } from "./exporting.js";

export class Options {
  /** on: { rename, delete }, called with the chat, whose title is the new one by then. */
  constructor(on) {
    this.chat = null;
    this.dialog = byId("options-dialog");
    byId("options-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.chat.title = byId("title").value.trim() || this.chat.title;
      on.rename(this.chat);
      this.dialog.close();
    });
    byId("save-markdown").addEventListener("click", () => saveAsMarkdown(this.chat));
    byId("save-json").addEventListener("click", () => saveAsJson(this.chat));
    byId("options-close").addEventListener("click", () => this.dialog.close());
    onSecondClick(byId("delete-chat"), "Delete for good", () => {
      this.dialog.close();
      on.delete(this.chat);
    });
  }

  open(chat) {
    this.chat = chat;
    byId("title").value = chat.title;
    this.dialog.showModal();
    byId("title").select();
  }
}
