// What a chat is kept as, and what is sent of it.
//
// A turn is { question, answer, thoughts, calls, request, result, ending }: the question is null where
// the answer goes on after results of calls; `calls` are { id, name, arguments, result }; `request` is
// { system, fields }, what the settings added to the messages; `result` is what streamAnswer gives;
// `ending` is "complete", "stopped" or what went wrong.

/** A turn after `last`. Long settings that did not change are one object, and kept once. */
export function newTurn(question, request, last) {
  const isSame = last && JSON.stringify(last.request) === JSON.stringify(request);
  return {
    question, answer: "", thoughts: "", calls: [], request: isSame ? last.request : request,
    result: null, ending: "",
  };
}

/** The body of the request that asked for the answer of this turn. */
export function requestBody(earlier, turn) {
  const { system, fields } = turn.request;
  return {
    messages: [
      ...(system.trim() === "" ? [] : [{ role: "system", content: system }]),
      ...earlier.flatMap(messagesOf),
      ...asked(turn),
    ],
    ...fields,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

/** What a next turn sends of this one; a question without an answer is left out. */
export function messagesOf(turn) {
  if (turn.answer === "" && turn.calls.length === 0) return [];
  const answer = { role: "assistant", content: turn.answer };
  // The model's chat template keeps or drops them.
  if (turn.thoughts !== "") answer.reasoning_content = turn.thoughts;
  if (turn.calls.length) {
    answer.tool_calls = turn.calls.map(({ id, name, arguments: given }) =>
      ({ id, type: "function", function: { name, arguments: given } }));
  }
  return [
    ...asked(turn),
    answer,
    ...turn.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result })),
  ];
}

const asked = ({ question }) => (question === null ? [] : [{ role: "user", content: question }]);

/** The same request in a shell, without the key: whoever has one puts it into $API_KEY. */
export function curlCommand(address, body, needsKey) {
  const quoted = `'${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`;
  return `curl -N ${address} \\\n  -H 'Content-Type: application/json' \\\n`
    + (needsKey ? '  -H "Authorization: Bearer $API_KEY" \\\n' : "")
    + `  -d ${quoted}\n`;
}
