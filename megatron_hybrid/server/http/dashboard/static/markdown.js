// Markdown as elements. What a model says is a stranger's text: markdown-it takes no HTML from it,
// and of what it makes of the text only the tags below are shown.

import { decorateCode } from "./code.js";
import { element } from "./elements.js";
import { readMaths } from "./maths.js";
import { purified } from "./purified.js";
import MarkdownIt from "./vendor/markdown-it.min.js";

const TAGS = ["a", "blockquote", "br", "code", "em", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const ATTRIBUTES = ["class", "href", "start"];
const LINKS = /^(https?|mailto):/i;
const HEADINGS_ABOVE = 3; // the page's own: an answer's begin below them

const parser = MarkdownIt({ html: false, linkify: true, breaks: true }).use(readMaths);
parser.validateLink = (address) => LINKS.test(address.trim());
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.rs is a file
parser.core.ruler.push("page", ({ tokens }) => {
  for (const token of tokens) {
    if (token.type.startsWith("heading_")) {
      token.tag = `h${Math.min(6, Number(token.tag[1]) + HEADINGS_ABOVE)}`;
    }
    const style = token.attrGet("style"); // of a table's cells; the page allows no inline style
    if (style) token.attrs = [["class", style.replace("text-align:", "align-")]];
  }
});
// Nothing is fetched for an answer: an image is a link to it.
parser.renderer.rules.image = (tokens, i) => {
  const { escapeHtml } = parser.utils;
  const address = tokens[i].attrGet("src");
  return `<a href="${escapeHtml(address)}">${escapeHtml(tokens[i].content || address)}</a>`;
};

/** A text that grows, shown as Markdown: what has ended stays as it is, the rest is made anew. */
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.settledLength = 0; // of the text
    this.settledNodes = 0; // of the container
    this.definesLinks = false; // somewhere, perhaps behind their uses
  }

  /** Show `text`, which begins with the one that was shown before. */
  show(text) {
    const rest = text.slice(this.settledLength);
    const tokens = this.parse(rest);
    const lines = lineStarts(rest);
    // A block whose first line has ended is what it is; more text may still belong to it, but no
    // longer to the blocks before it.
    const last = tokens.findLastIndex(({ level, nesting, map }) =>
      level === 0 && nesting >= 0 && map && map[0] < lines.length - 1);
    this.dropTail();
    if (last > 0) {
      this.append(tokens.slice(0, last), true);
      this.settledLength += lines[tokens[last].map[0]];
      this.settledNodes = this.container.childNodes.length;
    }
    this.append(tokens.slice(Math.max(0, last)), false);
  }

  /** Show the whole text. */
  finish(text) {
    if (this.definesLinks) this.settledLength = this.settledNodes = 0;
    this.dropTail();
    this.append(this.parse(text.slice(this.settledLength)), true);
  }

  parse(text) {
    const env = {};
    const tokens = parser.parse(text, env);
    this.definesLinks ||= Object.keys(env.references ?? {}).length > 0;
    return tokens;
  }

  dropTail() {
    while (this.container.childNodes.length > this.settledNodes) this.container.lastChild.remove();
  }

  append(tokens, haveEnded) {
    const html = parser.renderer.render(tokens, parser.options, {});
    const fragment = purified(html, TAGS, ATTRIBUTES);
    for (const link of fragment.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer";
    }
    for (const table of fragment.querySelectorAll("table")) {
      const box = element("div", { class: "wide", role: "region", "aria-label": "Table", tabindex: 0 });
      table.replaceWith(box);
      box.append(table);
    }
    for (const code of fragment.querySelectorAll("pre > code")) decorateCode(code, haveEnded);
    this.container.append(fragment);
  }
}

/** Where each line begins, as markdown-it counts them; the last one may be empty. */
function lineStarts(text) {
  return [0, ...[...text.matchAll(/\r\n?|\n/g)].map((end) => end.index + end[0].length)];
}
