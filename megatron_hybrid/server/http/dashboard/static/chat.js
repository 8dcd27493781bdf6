// The chat: a list of turns, the form below it, and the settings above.

import { byId, setText } from "./elements.js";
import { streamAnswer } from "./stream.js";
import { Turn } from "./turn.js";

const HINT = "Enter sends, Shift+Enter begins a new line.";
const HINT_BUSY = "Esc stops the answer.";
const HINT_EDIT = "What follows the edited message is replaced. Esc leaves it as it was.";
const NEAR_THE_END_PIXELS = 48;

class Chat {
  constructor() {
    this.log = byId("log");
    this.welcome = byId("welcome");
    this.question = byId("question");
    this.sendButton = byId("send");
    this.note = byId("composer-note");
    this.turns = [];
    this.edited = null; // the turn whose question is in the form
    this.draft = ""; // what was in the form before that
    this.request = null; // the AbortController of the answer that comes
    this.listen();
    this.showState();
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
      else if (this.edited) this.cancelEdit();
    });
    byId("new-chat").addEventListener("click", () => this.clear());
    for (const id of ["system", "temperature", "max-tokens"]) {
      byId(id).addEventListener("input", () => this.showSettings());
    }
    this.showSettings();
  }

  /** Ask; after an edit, in the place of the edited turn and all that follow it. */
  async send(text, replaced = this.edited) {
    if (text.trim() === "" || !this.settingsAreValid()) return;
    if (replaced) this.dropFrom(replaced);
    this.question.value = "";
    this.edited = null;
    const turn = new Turn(text, {
      onEdit: (chosen) => this.edit(chosen),
      onAgain: (chosen) => this.askAgain(chosen),
    });
    const messages = [
      ...this.systemMessage(),
      ...this.turns.flatMap((earlier) => earlier.messages()),
      { role: "user", content: text },
    ];
    this.turns.push(turn);
    this.log.append(turn.element);
    this.scrollToEnd();
    await this.answer(turn, messages);
  }

  async answer(turn, messages) {
    const request = new AbortController();
    this.request = request;
    this.showState();
    const followed = (add) => (piece, seconds) => {
      const follow = this.isAtEnd();
      add(piece, seconds);
      if (follow) this.scrollToEnd();
    };
    const ending = await streamAnswer(
      messages,
      this.settings(),
      request.signal,
      followed((piece, seconds) => turn.add(piece, seconds)),
      followed((piece, seconds) => turn.addThoughts(piece, seconds)),
    ).then(
      (result) => () => turn.end(result),
      (error) => () => (request.signal.aborted ? turn.stop() : turn.fail(error.message)),
    );
    const follow = this.isAtEnd();
    ending();
    if (follow) this.scrollToEnd();
    if (this.request === request) this.request = null;
    this.showState();
  }

  askAgain(turn) {
    const draft = this.edited ? this.draft : this.question.value;
    this.send(turn.question, turn);
    this.question.value = draft;
    this.question.focus();
  }

  edit(turn) {
    if (!this.edited) this.draft = this.question.value;
    this.edited = turn;
    this.question.value = turn.question;
    this.question.focus();
    this.showState();
  }

  cancelEdit() {
    this.edited = null;
    this.question.value = this.draft;
    this.showState();
  }

  dropFrom(turn) {
    for (const dropped of this.turns.splice(this.turns.indexOf(turn))) dropped.element.remove();
  }

  clear() {
    this.request?.abort();
    this.request = null;
    this.edited = null;
    for (const turn of this.turns.splice(0)) turn.element.remove();
    this.showState();
    this.question.focus();
  }

  systemMessage() {
    const content = byId("system").value;
    return content.trim() === "" ? [] : [{ role: "system", content }];
  }

  settings() {
    const limit = byId("max-tokens").value;
    return {
      temperature: Number(byId("temperature").value || 1),
      maxTokens: limit === "" ? null : Number(limit),
    };
  }

  /** Whether the numbers can be sent; if not, the browser says what is wrong with which. */
  settingsAreValid() {
    const wrong = ["temperature", "max-tokens"].map(byId).find((field) => !field.validity.valid);
    if (!wrong) return true;
    document.querySelector(".settings").open = true;
    wrong.reportValidity();
    return false;
  }

  showSettings() {
    const { temperature, maxTokens } = this.settings();
    const limit = maxTokens === null ? "as many tokens as fit" : `at most ${maxTokens} tokens`;
    const system = this.systemMessage().length ? ", system prompt" : "";
    setText(byId("settings-summary"), `temperature ${temperature}, ${limit}${system}`);
  }

  showState() {
    const busy = this.request !== null;
    this.welcome.hidden = this.turns.length > 0;
    setText(this.sendButton, busy ? "Stop" : "Send");
    this.sendButton.classList.toggle("stop", busy);
    setText(this.note, busy ? HINT_BUSY : this.edited ? HINT_EDIT : HINT);
    const from = this.edited ? this.turns.indexOf(this.edited) : this.turns.length;
    this.turns.forEach((turn, i) => {
      turn.element.classList.toggle("replaced", i >= from);
      turn.editButton.disabled = busy;
      turn.againButton.disabled = busy;
      turn.againButton.hidden = i !== this.turns.length - 1;
    });
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    return scrollHeight - scrollTop - clientHeight < NEAR_THE_END_PIXELS;
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

export const installChat = () => new Chat();
