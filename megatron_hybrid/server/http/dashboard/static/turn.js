// One turn of the chat: what was asked, the answer as it comes, and what it cost.

import { element, setText } from "./elements.js";
import { duration, percent, rate, whole } from "./format.js";

const WHY_ENDED = { length: "at the limit of tokens" };

export class Turn {
  constructor(question, { onEdit, onAgain }) {
    this.question = question;
    this.answer = "";
    this.thoughts = "";

    this.thoughtsText = element("p", { class: "thoughts-text" });
    this.thoughtsBox = element("details", { class: "thoughts", hidden: "" },
      element("summary", {}, "Thoughts"), this.thoughtsText);
    this.text = element("p", { class: "text" });
    this.bar = element("span", { class: "share-cached" });
    this.figures = element("p", { class: "figures" });
    this.error = element("p", { class: "error", role: "alert", hidden: "" });
    this.editButton = element("button", { type: "button", class: "quiet small" }, "Edit");
    this.againButton = element("button", { type: "button", class: "quiet small" }, "Ask again");
    this.editButton.addEventListener("click", () => onEdit(this));
    this.againButton.addEventListener("click", () => onAgain(this));
    this.answerBox = element("div", { class: "answer", "aria-busy": "true" },
      element("h3", { class: "visually-hidden" }, "Answer"), this.thoughtsBox, this.text, this.error);
    this.element = element("article", { class: "turn" },
      element("div", { class: "question" },
        element("h3", { class: "visually-hidden" }, "You"),
        element("p", { class: "text" }, question)),
      this.answerBox,
      // Not read out with the answer: it changes while the answer comes.
      element("div", { class: "turn-foot", "aria-live": "off" },
        element("div", { class: "share", "aria-hidden": "true" }, this.bar),
        this.figures,
        element("div", { class: "turn-buttons" }, this.editButton, this.againButton)));
    this.say("reading the prompt");
  }

  /** What a next turn sends of this one; a question without an answer is left out. */
  messages() {
    if (this.answer === "") return [];
    const answer = { role: "assistant", content: this.answer };
    // The model's chat template keeps or drops them.
    if (this.thoughts !== "") answer.reasoning_content = this.thoughts;
    return [{ role: "user", content: this.question }, answer];
  }

  addThoughts(piece, secondsToFirst) {
    this.begin(secondsToFirst);
    this.thoughts += piece;
    this.thoughtsBox.hidden = false;
    this.thoughtsText.append(piece);
  }

  add(piece, secondsToFirst) {
    this.begin(secondsToFirst);
    this.answer += piece;
    this.text.append(piece);
  }

  begin(secondsToFirst) {
    if (this.secondsToFirst !== undefined) return;
    this.secondsToFirst = secondsToFirst;
    this.say(`first token ${duration(secondsToFirst)}`);
  }

  end(result) {
    this.close();
    const { promptTokens, cachedTokens, completionTokens, finishReason } = result;
    const cached = cachedTokens === undefined ? `${whole(promptTokens)} prompt tokens`
      : `${whole(cachedTokens)} of ${whole(promptTokens)} prompt tokens cached `
        + `(${percent(cachedTokens, promptTokens)})`;
    this.bar.style.width = promptTokens ? `${(100 * (cachedTokens ?? 0)) / promptTokens}%` : "0";
    this.figures.replaceChildren(
      item("cached", cached),
      item("first", `first token ${duration(result.secondsToFirst)}`),
      item("speed", `${whole(completionTokens)} tokens at ${rate(result.tokensPerSecond)}/s`),
    );
    if (finishReason in WHY_ENDED) {
      this.figures.append(item("ended", `ended ${WHY_ENDED[finishReason]}`));
    }
    if (this.answer === "") this.text.append(element("em", {}, "an empty answer"));
  }

  stop() {
    this.close();
    this.say(this.secondsToFirst === undefined ? "stopped before the first token"
      : `stopped · first token ${duration(this.secondsToFirst)}`);
  }

  fail(message) {
    this.close();
    this.say("no complete answer");
    this.error.hidden = false;
    setText(this.error, message);
  }

  close() {
    this.text.normalize(); // one text node, not one a token
    this.thoughtsText.normalize();
    this.answerBox.setAttribute("aria-busy", "false");
  }

  say(text) {
    this.figures.replaceChildren(item("state", text));
  }
}

const item = (name, text) => element("span", { class: name }, text);
