// Run where NODE_PATH has openai-node and nothing of ours: prints what its client got, as JSON.
"use strict";
const OpenAI = require("openai");

const QUESTION = [{ role: "user", content: "What is the capital of France?" }];

async function models(client, model) {
  const listed = [];
  for await (const one of client.models.list()) listed.push(one.id);
  return { listed, retrieved: (await client.models.retrieve(model)).id };
}

async function chat(client, model) {
  const asked = { model, messages: QUESTION, max_completion_tokens: 24, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  const runner = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const events = new Set();
  let pieces = "";
  for (const name of ["connect", "chunk", "content", "message", "finalChatCompletion", "error", "end"])
    runner.on(name, () => events.add(name));
  runner.on("content", (piece) => (pieces += piece));
  const streamed = await runner.finalChatCompletion();
  return {
    contents: [whole.choices[0].message.content, streamed.choices[0].message.content, pieces],
    finish: [whole.choices[0].finish_reason, streamed.choices[0].finish_reason],
    usage: [whole.usage.total_tokens, streamed.usage.total_tokens],
    events: [...events].sort(),
  };
}

// Two prompts of two choices each, whole and streamed.
async function choices(client, model) {
  const asked = { model, prompt: ["Paris is the", "Once upon a"], n: 2, max_tokens: 6, seed: 5 };
  const whole = await client.completions.create(asked);
  const streamed = ["", "", "", ""];
  const finished = [];
  for await (const chunk of await client.completions.create({ ...asked, stream: true }))
    for (const choice of chunk.choices) {
      streamed[choice.index] += choice.text;
      if (choice.finish_reason) finished.push(choice.index);
    }
  return { whole: whole.choices.map((choice) => choice.text), streamed, finished: finished.sort() };
}

async function logprobs(client, model) {
  const asked = { model, messages: QUESTION, max_tokens: 8, temperature: 0, logprobs: true, top_logprobs: 2 };
  const whole = (await client.chat.completions.create(asked)).choices[0];
  const streamed = [];
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
    streamed.push(...(chunk.choices[0].logprobs?.content ?? []));
  const spelled = (tokens) => Buffer.from(tokens.flatMap((token) => token.bytes)).toString();
  return {
    text: whole.message.content,
    spelled: [spelled(whole.logprobs.content), spelled(streamed)],
    tops: whole.logprobs.content.map((token) => token.top_logprobs.length),
  };
}

async function response(client, model) {
  const asked = { model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(asked);
  const streamed = await client.responses.stream(asked).finalResponse();
  return { texts: [whole.output_text, streamed.output_text], statuses: [whole.status, streamed.status] };
}

// What is shown of each refusal that a client can meet.
async function errors(client, model) {
  const asked = { model, messages: QUESTION, max_tokens: 4 };
  const create = (changes) => client.chat.completions.create({ ...asked, ...changes });
  return shownOf({
    no_room: () => create({ max_tokens: 1000000 }),
    no_room_to_stream: () => create({ max_tokens: 1000000, stream: true }),
    unknown_model: () => create({ model: "gpt-9" }),
    several: () => create({ temperature: 9, messages: [] }),
    unknown_route: () => client.post("/nope", { body: {} }),
    method: () => client.get("/chat/completions"),
    too_large: () => create({ user: "x".repeat(17 * 2 ** 20) }),
    content_type: () => client.post("/completions", { body: "hi", headers: { "Content-Type": "text/plain" } }),
    not_built: () => client.embeddings.create({ model, input: "hi" }),
  });
}

// What is shown if nothing can be had at all.
async function refusal(client, model) {
  return shownOf({ refused: () => client.chat.completions.create({ model, messages: QUESTION }) });
}

// What is shown of a stream that the server ends with an error.
async function brokenStream(client, model) {
  const pieces = [];
  const shown = await shownOf({
    broken: async () => {
      const stream = await client.chat.completions.create({ model, messages: QUESTION, stream: true });
      for await (const chunk of stream) pieces.push(chunk.choices[0]?.delta.content ?? "");
    },
  });
  return { pieces, ...shown };
}

async function shownOf(attempts) {
  const shown = {};
  for (const [name, attempt] of Object.entries(attempts))
    try {
      await attempt();
      shown[name] = null;
    } catch (error) {
      const { message, status, code, param, type } = error;
      const wait = error.headers?.get("retry-after") ?? null;
      shown[name] = { class: error.constructor.name, message, status, code, param, type, wait };
    }
  return shown;
}

async function leave(client, model) {
  const asked = { model, prompt: "Once", max_tokens: 1500, ignore_eos: true, stream: true };
  const stream = await client.completions.create(asked);
  for await (const chunk of stream) {
    stream.controller.abort();
    return { first: chunk.choices[0].text };
  }
}

const CALLS = { models, chat, choices, logprobs, response, errors, refusal, brokenStream, leave };

async function main(call, url, model) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
  console.log(JSON.stringify(await CALLS[call](client, model)));
}

main(...process.argv.slice(2));
