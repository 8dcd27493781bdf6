// A chat as a file.

import { element } from "./elements.js";
import { messagesOf } from "./messages.js";

export function saveAsJson(chat) {
  const { title, changed, settings, turns } = chat;
  const messages = turns.flatMap(messagesOf);
  const kept = { title, changed: new Date(changed).toISOString(), settings, messages };
  save(chat, "json", "application/json", JSON.stringify(kept, null, 2) + "\n");
}

export function saveAsMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  for (const { question, thoughts, answer, calls } of chat.turns) {
    if (question !== null) parts.push("## Question", question);
    parts.push("## Answer");
    if (thoughts !== "") parts.push("### Thoughts", thoughts, "### Said");
    if (answer !== "") parts.push(answer);
    for (const { name, arguments: given, result } of calls) {
      parts.push(`### Call of ${name}`, fenced(given, "json"), "Result:", fenced(result, ""));
    }
  }
  save(chat, "md", "text/markdown", parts.join("\n\n") + "\n");
}

/** A block of code that the text cannot end. */
function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

function save({ title }, ending, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat";
  element("a", { href: address, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
