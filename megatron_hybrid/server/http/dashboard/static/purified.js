// Markup of text, the only place where there is any: DOMPurify lets through what is named and no more.
// The page's Content-Security-Policy lets nobody else make any (require-trusted-types-for).

import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;

/** A fragment with no other tags and attributes than these. */
export function purified(html, tags, attributes) {
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS: tags,
    ALLOWED_ATTR: attributes,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}
