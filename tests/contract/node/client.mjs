// Talks to a server through the OpenAI SDK for Node, and prints what came back as one JSON object.
// Arguments: the server's address, the model's name, the tools as JSON, the result of a call.
import OpenAI from "openai";

const [url, model, toolsText, result] = process.argv.slice(2);
const tools = JSON.parse(toolsText);
let tries = 0;
const client = new OpenAI({
  baseURL: `${url}/v1`,
  apiKey: "none",
  fetch: (...request) => {
    tries += 1;
    return fetch(...request);
  },
});
const said = (text) => [{ role: "user", content: text }];
const base = { model, temperature: 0 };
const found = {};

found.models = (await client.models.list()).data.map((each) => each.id);
found.model = await client.models.retrieve(model);

const asked = { ...base, messages: said("Hi."), logprobs: true, top_logprobs: 2 };
found.chat = await client.chat.completions.create(asked);

found.stream = { content: "", entries: [], finish: [], usage: null };
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
  found.stream.usage ??= chunk.usage;
  for (const part of chunk.choices) {
    found.stream.content += part.delta.content ?? "";
    found.stream.entries.push(...(part.logprobs?.content ?? []));
    if (part.finish_reason) found.stream.finish.push(part.finish_reason);
  }
}

found.helper = await client.chat.completions.stream(asked).finalChatCompletion();

found.calls = {};
const named = { type: "function", function: { name: "get_weather" } };
for (const [name, choice] of Object.entries({ auto: "auto", required: "required", named })) {
  const request = { ...base, messages: said("One call."), tools, tool_choice: choice };
  found.calls[name] = (await client.chat.completions.create(request)).choices[0];
}
const request = { ...base, messages: said("Two calls."), tools };
found.streamedCalls = (await client.chat.completions.stream(request).finalChatCompletion()).choices[0];

const message = found.calls.auto.message;
const messages = [
  ...said("One call."),
  message,
  { role: "tool", tool_call_id: message.tool_calls[0].id, content: result },
];
found.answer = (await client.chat.completions.create({ ...base, messages, tools })).choices[0];

const run = client.chat.completions.runTools({
  ...base,
  messages: said("One call."),
  tools: [{ ...tools[0], function: { ...tools[0].function, parse: JSON.parse, function: () => result } }],
});
found.runner = await run.finalContent();

const schema = {
  type: "object",
  properties: { name: { type: "string" }, days: { type: "array", items: { type: "integer" } } },
  required: ["name", "days"],
  additionalProperties: false,
};
const format = { type: "json_schema", json_schema: { name: "event", strict: true, schema } };
const structured = { ...base, messages: said("An event."), response_format: format };
found.structured = (await client.chat.completions.create(structured)).choices[0].message.content;

const text = { ...base, prompt: "Hi", max_tokens: 60, echo: true, logprobs: 1 };
found.completion = (await client.completions.create(text)).choices[0];
found.streamedText = "";
for await (const chunk of await client.completions.create({ ...text, stream: true })) {
  found.streamedText += chunk.choices[0]?.text ?? "";
}

found.errors = [];
const wrong = [{ temperature: -1 }, { model: "other" }, { frob: 1 }, { stream: true, top_p: 2 }];
for (const fields of wrong) {
  tries = 0;
  try {
    await client.chat.completions.create({ ...base, messages: said("Hi."), ...fields });
    found.errors.push(null);
  } catch (error) {
    const { status, code, param, type } = error;
    found.errors.push({ kind: error.constructor.name, status, code, param, type, tries });
  }
}

console.log(JSON.stringify(found));
