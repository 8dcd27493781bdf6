// A streamed chat completion: server-sent events in, text and figures out.

import { ApiError, call } from "./api.js";

// Less time than this between the first and the last token is no measure of a speed.
const SHORTEST_SPAN_SECONDS = 0.02;

/** The data of each server-sent event, whatever pieces the bytes come in. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        } else if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    // Whoever stops reading early closes the connection. After an abort it is closed already.
    reader.cancel().catch(() => {});
  }
}

/**
 * Ask for an answer and hand it on as it comes.
 *
 * onPiece(delta, so far) is called for each piece: a delta of the wire, and what is known by then.
 * Returns what is known at the end: promptTokens, cachedTokens, completionTokens, secondsToFirst,
 * tokensPerSecond, finishReason; a server may keep cachedTokens to itself, which is undefined then.
 * Throws ApiError, or AbortError when `signal` ends it.
 */
export async function streamAnswer(body, signal, onPiece) {
  const begun = performance.now();
  const response = await call("v1/chat/completions", { body, signal });
  const seconds = () => (performance.now() - begun) / 1000;
  let [first, last, usage, finishReason, complete] = [null, null, null, null, false];
  const known = () => ({
    promptTokens: usage?.prompt_tokens ?? null,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens,
    completionTokens: usage?.completion_tokens ?? null,
    secondsToFirst: first,
    tokensPerSecond: speed(usage?.completion_tokens, first, last),
    finishReason,
  });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, response.status);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    finishReason = choice.finish_reason ?? finishReason;
    const { content, reasoning_content: thoughts, tool_calls: calls } = choice.delta ?? {};
    if (!content && !thoughts && !calls?.length) continue;
    last = seconds();
    first ??= last;
    onPiece(choice.delta, known());
  }
  if (!complete) throw new ApiError("The connection broke before the answer was complete.", 0);
  return known();
}

function speed(tokens, first, last) {
  if (!tokens || first === null) return null;
  const span = last - first;
  return tokens > 1 && span >= SHORTEST_SPAN_SECONDS ? (tokens - 1) / span : tokens / last;
}
