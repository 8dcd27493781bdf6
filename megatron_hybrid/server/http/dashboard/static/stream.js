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
 * Ask for an answer and hand its text on as it comes.
 *
 * onText(piece, secondsToFirst) is called for each piece, and onThoughts likewise for what a model
 * thinks before it answers. Returns what is known at the end:
 * promptTokens, cachedTokens, completionTokens, secondsToFirst, tokensPerSecond, finishReason;
 * a server may keep cachedTokens to itself, which is undefined then.
 * Throws ApiError, or AbortError when `signal` ends it.
 */
export async function streamAnswer(messages, { temperature, maxTokens }, signal, onText, onThoughts) {
  const begun = performance.now();
  const body = { messages, temperature, stream: true, stream_options: { include_usage: true } };
  if (maxTokens !== null) body.max_completion_tokens = maxTokens;
  const response = await call("v1/chat/completions", { body, signal });
  const seconds = () => (performance.now() - begun) / 1000;
  let [first, last, usage, finishReason, complete] = [null, null, null, null, false];
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
    const { content, reasoning_content: thoughts } = choice.delta ?? {};
    if (content || thoughts) {
      last = seconds();
      first ??= last;
    }
    if (thoughts) onThoughts(thoughts, first);
    if (content) onText(content, first);
    finishReason = choice.finish_reason ?? finishReason;
  }
  if (!complete) throw new ApiError("The connection broke before the answer was complete.", 0);
  const completionTokens = usage?.completion_tokens ?? null;
  return {
    promptTokens: usage?.prompt_tokens ?? null,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens,
    completionTokens,
    secondsToFirst: first,
    tokensPerSecond: speed(completionTokens, first, last),
    finishReason,
  };
}

function speed(tokens, first, last) {
  if (!tokens || first === null) return null;
  const span = last - first;
  return tokens > 1 && span >= SHORTEST_SPAN_SECONDS ? (tokens - 1) / span : tokens / last;
}
