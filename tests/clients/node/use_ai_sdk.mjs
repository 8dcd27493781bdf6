// The AI SDK, whose OpenAI models speak /v1/responses: whole and streamed text, objects, a tool in a
// loop, and conversations that go on: stored items are referred to by their ids.

import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const common = { model: openai(name), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const question = "The code of the gate is 7315. What is the code of the gate?";

const whole = await generateText({ ...common, prompt: question });
assert(whole.text.includes("7315"), whole.text);
assert.strictEqual(whole.finishReason, "stop");
assert(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0);

const stream = streamText({ ...common, prompt: question });
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
assert(pieces.length > 3);
assert.strictEqual(pieces.join(""), whole.text);
console.log(whole.text);

// The second turn's history refers to the first answer, which the server has stored.
const messages = [{ role: "user", content: "The cat is called Pixel." }];
const first = await generateText({ ...common, messages });
messages.push(...first.response.messages, { role: "user", content: "What is the cat called?" });
const second = await generateText({ ...common, messages });
assert(JSON.stringify(second.request.body).includes("item_reference"));
assert(second.text.includes("Pixel"), second.text);
assert(second.usage.cachedInputTokens >= first.usage.totalTokens - 2, JSON.stringify(second.usage));
const third = await generateText({
  ...common,
  prompt: "What is the cat called?",
  providerOptions: { openai: { previousResponseId: first.response.id } },
});
assert.strictEqual(third.text, second.text);
console.log(second.text);

// Bounds, since the reference model does not know when a word or a number is long enough.
const schema = z.object({ name: z.string().max(20), people: z.number().int().min(0).max(1e9) });
const { object } = await generateObject({ ...common, schema, prompt: "Which city is large?" });
console.log(object);

const called = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => {
    called.push(city);
    return "It rains.";
  },
});
const loop = await generateText({
  ...common,
  prompt: "What is the weather in Paris?",
  tools: { weather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  providerOptions: { openai: { parallelToolCalls: false } },
});
assert.strictEqual(called.length, 1);
assert.strictEqual(loop.steps.length, 2);
assert(loop.text.length > 0);
console.log(called, loop.text);
