// The conversation: its turns, the form below them, and the settings above.

import { call } from "./api.js";
import { byId, setText } from "./elements.js";
import { whole } from "./format.js";
import { newTurn, requestBody } from "./messages.js";
import { Settings } from "./settings.js";
import { streamAnswer } from "./stream.js";
import { Turn } from "./turn.js";

const HINT = "Enter sends, Shift+Enter begins a new line.";
const HINT_BUSY = "Esc stops the answer.";
const HINT_EDIT = "What follows the edited message is replaced. Esc leaves it as it was.";
const NEAR_THE_END_PIXELS = 48;
const LITTLE_CONTEXT = 0.1; // of the whole

export class Chat {
  /** on.change(chat): there is something new to keep; on.curl(body): somebody wants this request. */
  constructor(on) {
    this.on = on;
    this.chat = null; // what is kept (store.js)
    this.log = byId("log");
    this.question = byId("question");
    this.sendButton = byId("send");
    this.settings = new Settings();
    this.turns = []; // as they are seen
    this.edited = null; // the turn whose question is in the form
    this.draft = ""; // what was in the form before that
    this.request = null; // the AbortController of the answer that comes
    this.contextLength = null; // tokens, of prompt and answer together
    this.listen();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.request) this.request.abort();
      else this.send(this.question.value);
    });
    this.question.addEventListener("keydown", (event) => {
      // While an input method composes a character, Enter belongs to it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.request) this.send(this.question.value);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (this.request) this.request.abort();
      else this.cancelEdit();
    });
    document.addEventListener("visibilitychange", () => {
      if (document.hidden && this.request) this.on.change(this.chat); // perhaps it is closed now
    });
  }

  /** Show this one; an answer that comes in another is stopped. */
  show(chat) {
    this.request?.abort();
    this.request = null;
    this.edited = null;
    this.chat = chat;
    this.settings.restore(chat.settings);
    for (const { element } of this.turns) element.remove();
    this.turns = chat.turns.map((turn) => this.seen(turn));
    this.log.append(...this.turns.map(({ element }) => element));
    this.showState();
    this.scrollToEnd();
    this.question.focus();
  }

  seen(turn) {
    return new Turn(turn, {
      edit: (chosen) => this.edit(chosen),
      again: (chosen) => this.askAgain(chosen),
      results: () => this.goOn(),
      curl: (chosen) => this.on.curl(this.bodyOf(chosen)),
      painting: (paint) => this.following(paint),
    });
  }

  bodyOf(chosen) {
    const earlier = this.turns.slice(0, this.turns.indexOf(chosen));
    return requestBody(earlier.map(({ turn }) => turn), chosen.turn);
  }

  /** What is in the form; after an edit, in the place of the edited turn and all that follow it. */
  send(text) {
    if (text.trim() === "" || !this.settings.areValid()) return;
    const replaced = this.edited;
    this.question.value = "";
    this.edited = null;
    this.ask(text, replaced);
  }

  askAgain(chosen) {
    this.cancelEdit();
    this.ask(chosen.turn.question, chosen);
    this.question.focus();
  }

  /** With the results of calls. */
  goOn() {
    this.cancelEdit();
    this.ask(null);
    this.question.focus();
  }

  /** question: null to go on after results of calls; replaced: the first turn that goes. */
  async ask(question, replaced = null) {
    if (!this.settings.areValid()) return;
    if (replaced) this.dropFrom(replaced);
    const { chat } = this; // another one may be shown by the time the answer ends
    const asked = this.seen(newTurn(question, this.settings.request(), chat.turns.at(-1)));
    this.turns.push(asked);
    chat.turns.push(asked.turn);
    chat.settings = this.settings.values();
    this.log.append(asked.element);
    this.scrollToEnd();
    const request = new AbortController();
    this.request = request;
    this.showState();
    this.on.change(chat);
    const ending = await streamAnswer(this.bodyOf(asked), request.signal,
      (delta, result) => asked.add(delta, result),
    ).then(
      (result) => () => asked.end("complete", result),
      (error) => () => asked.end(request.signal.aborted ? "stopped" : error.message),
    );
    this.following(ending);
    if (this.request === request) this.request = null;
    this.on.change(chat);
    if (this.chat !== chat) return;
    this.showState();
    this.showContext(await this.askContextLength());
  }

  edit(chosen) {
    if (!this.edited) this.draft = this.question.value;
    this.edited = chosen;
    this.question.value = chosen.turn.question;
    this.question.focus();
    this.showState();
  }

  cancelEdit() {
    if (!this.edited) return;
    this.edited = null;
    this.question.value = this.draft;
    this.showState();
  }

  dropFrom(chosen) {
    const from = this.turns.indexOf(chosen);
    for (const dropped of this.turns.splice(from)) dropped.element.remove();
    this.chat.turns.splice(from);
  }

  showState() {
    const isBusy = this.request !== null;
    byId("welcome").hidden = this.turns.length > 0;
    setText(this.sendButton, isBusy ? "Stop" : "Send");
    this.sendButton.classList.toggle("stop", isBusy);
    setText(byId("composer-note"), isBusy ? HINT_BUSY : this.edited ? HINT_EDIT : HINT);
    const from = this.edited ? this.turns.indexOf(this.edited) : this.turns.length;
    this.turns.forEach((turn, i) => turn.showState({
      isLast: i === this.turns.length - 1, isBusy, isReplaced: i >= from,
    }));
    this.showContext(this.contextLength);
  }

  async askContextLength() {
    try {
      const { data } = await (await call("v1/models")).json();
      this.contextLength = data[0].max_model_len;
    } catch {
      // Then it stays as it was: nothing is shown, or what was known.
    }
    return this.contextLength;
  }

  /** How much room the conversation has left. */
  showContext(length) {
    const last = this.turns.at(-1)?.turn.result;
    const left = length - last?.promptTokens - last?.completionTokens;
    const known = length !== null && Number.isFinite(left);
    setText(byId("context"), known ? `${whole(left)} of ${whole(length)} tokens of context left` : "");
    byId("context").classList.toggle("little", known && left < LITTLE_CONTEXT * length);
  }

  /** Change what is seen, and stay at the end if that is where people are. */
  following(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const follow = scrollHeight - scrollTop - clientHeight < NEAR_THE_END_PIXELS;
    change();
    if (follow) this.scrollToEnd();
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}
