// Making and finding elements. Text always becomes a text node, never markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Set text only where it differs, so that screen readers do not repeat what they have said. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
