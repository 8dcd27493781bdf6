// Formulas in TeX stay as they were written: to Markdown, _ and * in them would be emphasis and \(
// an escaped bracket.

const CLOSING = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const ONE_DOLLAR = /\$(?![\s$])[^$\n]{0,500}?(?<![\s\\])\$(?!\d)/y; // not what costs $5 or $10
const LONGEST = 5000; // characters: what is longer is no formula that somebody reads

/** A plugin of markdown-it. */
export function readMaths(parser) {
  parser.inline.ruler.before("escape", "maths", inline);
  parser.block.ruler.before("fence", "maths", block, { alt: ["paragraph", "blockquote", "list"] });
  const { escapeHtml } = parser.utils;
  parser.renderer.rules.maths = (tokens, i) =>
    `<span class="maths">${escapeHtml(tokens[i].content)}</span>`;
  parser.renderer.rules.maths_block = (tokens, i) =>
    `<p class="maths">${escapeHtml(tokens[i].content)}</p>\n`;
}

function inline(state, silent) {
  const end = endOfFormula(state.src.slice(state.pos, state.pos + LONGEST));
  if (!end) return false;
  if (!silent) state.push("maths", "", 0).content = state.src.slice(state.pos, state.pos + end);
  state.pos += end;
  return true;
}

function endOfFormula(text) {
  const closing = CLOSING[text.slice(0, 2)];
  if (closing) {
    const found = text.indexOf(closing, 2);
    return found < 0 ? 0 : found + 2;
  }
  ONE_DOLLAR.lastIndex = 0;
  return text[0] === "$" && ONE_DOLLAR.test(text) ? ONE_DOLLAR.lastIndex : 0;
}

/** \[ or $$ at the beginning of a line, up to the line that has its end or to an empty one: that it
 * is one is known when its first line has ended, whatever is still on its way. */
function block(state, first, last, silent) {
  const start = state.bMarks[first] + state.tShift[first];
  const opening = state.src.slice(start, start + 2);
  if (opening === "\\(" || !(opening in CLOSING) || state.sCount[first] - state.blkIndent >= 4) {
    return false;
  }
  const closing = CLOSING[opening];
  let rest = state.src.slice(start + 2, state.eMarks[first]).trimEnd();
  if (rest.includes(closing) && !rest.endsWith(closing)) return false; // a sentence begins with it
  let line = first + 1;
  while (!rest.includes(closing) && line < last && !state.isEmpty(line)) {
    rest = state.src.slice(state.bMarks[line], state.eMarks[line]);
    line++;
  }
  if (silent) return true;
  const token = state.push("maths_block", "", 0);
  token.content = state.getLines(first, line, state.blkIndent, false).trim();
  token.map = [first, line];
  state.line = line;
  return true;
}
