// The chats that this browser keeps: their list, and which of them is shown.
//
// The address names the shown one (#1a2b...), so that a reload and the back button lead to it.

import { Chat } from "./chat.js";
import { onSecondClick } from "./confirming.js";
import { byId, element, setText } from "./elements.js";
import { Options } from "./options.js";
import { Store } from "./store.js";

const UNNAMED = "New chat";
const LONGEST_TITLE = 60; // characters of the first question
const FULL = "This browser has no more room: the chat is not kept. Export and delete older ones.";
const NONE_KEPT = "This browser keeps no chats: they last as long as the page.";

export class Chats {
  /** onCurl(body): somebody wants the command for this request. */
  constructor(onCurl) {
    this.store = null; // where the browser keeps nothing
    this.channel = new BroadcastChannel("megatron_hybrid.chats"); // other tabs
    this.channel.addEventListener("message", () => this.showList());
    this.options = new Options({
      rename: (chat) => this.write(() => this.store.put(chat)),
      delete: (chat) => this.delete(chat),
    });
    this.chat = new Chat({ change: (chat) => this.keep(chat), curl: onCurl });
    this.show(newChat({}));
    byId("new-chat").addEventListener("click", () => this.begin());
    byId("chats-button").addEventListener("click", () => this.openList(!this.listIsOpen));
    onSecondClick(byId("delete-all"), "Delete all for good", () => this.deleteAll());
    window.addEventListener("hashchange", () => this.showAddressed());
    this.opening = this.open();
  }

  async open() {
    try {
      this.store = await Store.open();
    } catch {
      setText(byId("chats-note"), NONE_KEPT);
      return;
    }
    // Somebody may have asked something already.
    if (location.hash && !this.chat.chat.turns.length) await this.showAddressed();
    else await this.showList();
  }

  /** A new chat, with the settings of the one before. */
  begin() {
    history.pushState(null, "", location.pathname + location.search);
    this.show(newChat(this.chat.settings.values()));
  }

  show(chat) {
    this.chat.show(chat);
    this.openList(false);
    this.showTitle();
    this.showList();
  }

  async showAddressed() {
    const id = location.hash.slice(1);
    const kept = id ? await this.store?.get(id) : undefined;
    // The page may have been closed while an answer came.
    for (const turn of kept?.turns ?? []) turn.ending ||= "stopped";
    this.show(kept ?? newChat({}));
  }

  async keep(chat) {
    await this.opening;
    if (chat.isDeleted || !this.store) return;
    if (chat.title === UNNAMED) chat.title = titleOf(chat.turns[0].question);
    chat.changed = Date.now();
    if (chat === this.chat.chat) history.replaceState(null, "", `#${chat.id}`);
    await this.write(() => this.store.put(chat));
  }

  async delete(chat) {
    chat.isDeleted = true; // an answer that comes does not bring it back
    await this.write(() => this.store.delete(chat.id));
    if (chat === this.chat.chat) this.begin();
  }

  async deleteAll() {
    this.chat.chat.isDeleted = true;
    await this.write(() => this.store.clear());
    this.begin();
  }

  /** Change what is kept, and show it here and in other tabs. */
  async write(change) {
    try {
      await change();
      setText(byId("chats-note"), "");
      this.channel.postMessage("changed");
    } catch (error) {
      setText(byId("chats-note"), error.name === "QuotaExceededError" ? FULL
        : `The chat is not kept: ${error.message}`);
    }
    this.showTitle();
    await this.showList();
  }

  showTitle() {
    const { title } = this.chat.chat;
    setText(byId("chat-title"), title);
    document.title = title === UNNAMED ? "megatron_hybrid" : `${title} - megatron_hybrid`;
  }

  async showList() {
    if (!this.store) return;
    const kept = await this.store.list();
    const list = byId("chat-list");
    const focused = list.contains(document.activeElement) && document.activeElement.id;
    list.replaceChildren(...kept.map(({ id, title }) => this.row(id, title)));
    if (focused) byId(focused)?.focus();
    byId("no-chats").hidden = kept.length > 0;
    byId("delete-all").hidden = kept.length === 0;
  }

  row(id, title) {
    const link = element("a", { id: `chat-${id}`, href: `#${id}` }, title);
    if (id === this.chat.chat.id) link.setAttribute("aria-current", "page");
    const options = element("button", {
      id: `options-${id}`, type: "button", class: "quiet small", "aria-label": `Options of ${title}`,
    }, "···");
    options.addEventListener("click", async () => {
      // The shown one may be newer than what is kept.
      const { chat } = this.chat;
      this.options.open(id === chat.id ? chat : await this.store.get(id));
    });
    return element("li", {}, link, options);
  }

  /** Where there is no room for the list beside the chat. */
  openList(isOpen) {
    this.listIsOpen = isOpen;
    byId("chats").classList.toggle("open", isOpen);
    byId("chats-button").setAttribute("aria-expanded", isOpen);
  }
}

function newChat(settings) {
  const bytes = crypto.getRandomValues(new Uint8Array(8)); // randomUUID is missing without TLS
  const id = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: UNNAMED, changed: 0, settings, turns: [] };
}

function titleOf(question) {
  const line = question.trim().split("\n")[0];
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE)}…` : line;
}
