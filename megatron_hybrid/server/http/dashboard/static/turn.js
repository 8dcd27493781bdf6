// One turn of the chat as it is seen: what was asked, the answer as it comes, and what it cost.

import { addCallPieces, CallsView } from "./calls.js";
import { codeBlock } from "./code.js";
import { copyButton } from "./copying.js";
import { element, setText } from "./elements.js";
import { explained } from "./explain.js";
import { TURN_CACHED } from "./explanations.js";
import { duration, percent, rate, whole } from "./format.js";
import { MarkdownView } from "./markdown.js";

const WHY_ENDED = { length: "at the limit of tokens" };
const SHORTEST_PAUSE_MS = 60; // between two paintings of an answer that comes
const PAINTING_SHARE = 0.25; // of the time at most; long answers are painted less often

export class Turn {
  /**
   * turn: what is kept of it (messages.js), written here as the answer comes.
   * on: { edit, again, results, curl }, called with this; { painting }, called with a function that
   * changes what is seen.
   */
  constructor(turn, on) {
    this.turn = turn;
    this.on = on;
    this.timer = null; // of the next painting
    this.pause = 0;
    this.thoughtsShown = 0; // characters
    this.thoughtsText = element("p", { class: "thoughts-text" });
    this.thoughtsBox = element("details", { class: "thoughts", hidden: "" },
      element("summary", {}, "Thoughts"), this.thoughtsText);
    this.text = element("div", { class: "text markdown" });
    this.markdown = new MarkdownView(this.text);
    this.calls = new CallsView(turn.calls, () => on.results(this));
    this.bar = element("span", { class: "share-cached" });
    this.figures = element("p", { class: "figures" });
    this.error = element("p", { class: "error", role: "alert", hidden: "" });
    this.editButton = button("Edit", () => on.edit(this));
    this.againButton = button("Ask again", () => on.again(this));
    this.answerBox = element("div", { class: "answer", "aria-busy": "true" },
      element("h3", { class: "visually-hidden" }, "Answer"),
      this.thoughtsBox, this.text, this.calls.element, this.error);
    this.element = element("article", { class: "turn" },
      this.answerBox,
      // Not read out with the answer: it changes while the answer comes.
      element("div", { class: "turn-foot", "aria-live": "off" },
        element("div", { class: "share", "aria-hidden": "true" }, this.bar),
        this.figures,
        element("div", { class: "turn-buttons" }, this.editButton, this.againButton,
          copyButton(() => turn.answer, "Copy"), button("curl", () => on.curl(this)))));
    if (turn.question !== null) {
      this.element.prepend(element("div", { class: "question" },
        element("h3", { class: "visually-hidden" }, "You"),
        element("p", { class: "text" }, turn.question)));
    }
    this.editButton.hidden = turn.question === null;
    if (turn.ending === "") this.say("reading the prompt");
    else this.finish();
  }

  /** A delta of the stream, and what is known by then. */
  add({ content, reasoning_content: thoughts, tool_calls: calls }, result) {
    this.turn.thoughts += thoughts ?? "";
    this.turn.answer += content ?? "";
    addCallPieces(this.turn.calls, calls ?? []);
    this.turn.result = result;
    this.timer ??= setTimeout(() => {
      const begun = performance.now();
      this.on.painting(() => this.paint());
      this.pause = Math.max(SHORTEST_PAUSE_MS, (performance.now() - begun) / PAINTING_SHARE);
      this.timer = null;
    }, this.pause);
  }

  paint() {
    const { answer, request, result } = this.turn;
    this.paintThoughts();
    if (request.fields.response_format) setText(this.text, answer); // JSON is no Markdown
    else this.markdown.show(answer);
    this.calls.show();
    this.say(`first token ${duration(result.secondsToFirst)} · ${speed(result)}`);
  }

  paintThoughts() {
    const { thoughts } = this.turn;
    this.thoughtsBox.hidden = thoughts === "";
    this.thoughtsText.append(thoughts.slice(this.thoughtsShown));
    this.thoughtsShown = thoughts.length;
  }

  /** `ending`: "complete", "stopped" or what went wrong. */
  end(ending, result = this.turn.result) {
    clearTimeout(this.timer);
    this.turn.ending = ending;
    this.turn.result = result;
    this.finish();
  }

  /** Show all there is. */
  finish() {
    const { answer, calls, ending, request, result } = this.turn;
    this.paintThoughts();
    this.thoughtsText.normalize(); // one text node, not one a painting
    if (request.fields.response_format && answer !== "") {
      this.text.replaceChildren(codeBlock(answer, "json"));
    } else {
      this.markdown.finish(answer);
    }
    this.calls.finish();
    this.answerBox.setAttribute("aria-busy", "false");
    if (ending === "complete") {
      this.showFigures(result);
      if (answer === "" && calls.length === 0) this.text.append(element("em", {}, "an empty answer"));
    } else if (ending === "stopped") {
      this.say(result === null ? "stopped before the first token"
        : `stopped · first token ${duration(result.secondsToFirst)} · ${speed(result)}`);
    } else {
      this.say("no complete answer");
      this.error.hidden = false;
      setText(this.error, ending);
    }
  }

  showFigures(result) {
    const { promptTokens, cachedTokens, finishReason } = result;
    const cached = cachedTokens === undefined ? `${whole(promptTokens)} prompt tokens`
      : explained(`${whole(cachedTokens)} of ${whole(promptTokens)} prompt tokens cached `
        + `(${percent(cachedTokens, promptTokens)})`, TURN_CACHED);
    this.bar.style.width = promptTokens ? `${(100 * (cachedTokens ?? 0)) / promptTokens}%` : "0";
    this.figures.replaceChildren(
      item("cached", cached),
      item("first", `first token ${duration(result.secondsToFirst)}`),
      item("speed", speed(result)),
    );
    if (finishReason in WHY_ENDED) {
      this.figures.append(item("ended", `ended ${WHY_ENDED[finishReason]}`));
    }
  }

  say(text) {
    this.figures.replaceChildren(item("state", text));
  }

  /** isLast: nothing follows; isBusy: an answer comes, here or elsewhere. */
  showState({ isLast, isBusy, isReplaced }) {
    this.element.classList.toggle("replaced", isReplaced);
    this.editButton.disabled = this.againButton.disabled = isBusy;
    this.againButton.hidden = !isLast;
    this.calls.allowResults(isLast && !isBusy);
  }
}

const item = (name, content) => element("span", { class: name }, content);

const speed = ({ completionTokens, tokensPerSecond }) =>
  `${whole(completionTokens)} tokens at ${rate(tokensPerSecond)}/s`;

function button(label, onClick) {
  const made = element("button", { type: "button", class: "quiet small" }, label);
  made.addEventListener("click", onClick);
  return made;
}
