// The chat: streams an answer token by token. Texts are inserted as text, never as HTML.

import { events } from "./api.js";

const at = (id) => document.getElementById(id);
const list = at("messages"), prompt = at("prompt"), tooltip = at("tooltip"), status = at("chat-status");
let history = [];
let running = null;

at("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  list.replaceChildren();
});

/** The request body of the conversation so far. Fields that the user leaves empty are left to the server. */
function body(messages) {
  const fields = {};
  for (const input of at("chat-form").querySelectorAll("input[type=number]")) {
    if (input.value !== "") fields[input.name] = Number(input.value);
  }
  if (at("logprobs").checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  if (at("tools").value.trim()) fields.tools = JSON.parse(at("tools").value);
  const system = at("system").value.trim();
  if (system) messages = [{ role: "system", content: system }, ...messages];
  return { messages, stream: true, stream_options: { include_usage: true }, ...fields };
}

async function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  const mine = { role: "user", content: text };
  const messages = [...history, mine];
  const control = (running = new AbortController());
  add("user").append(text);
  const answer = new Answer(add("assistant"));
  prompt.value = "";
  at("send").disabled = true;
  at("stop").disabled = false;
  status.textContent = "waiting";
  const started = performance.now();
  let first = null, tokens = null;
  try {
    for await (const chunk of events("v1/chat/completions", { body: body(messages), signal: control.signal })) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (first === null && (choice.delta.content || choice.delta.reasoning_content || choice.delta.tool_calls)) {
        first = performance.now() - started;
        status.textContent = "generating";
      }
      answer.push(choice);
    }
    const seconds = (performance.now() - started) / 1000;
    status.textContent = `${tokens ?? "?"} tokens in ${seconds.toFixed(2)} s, the first after ${Math.round(first ?? 0)} ms`;
  } catch (error) {
    status.textContent = control.signal.aborted ? "stopped" : "failed";
    if (!control.signal.aborted) add("error").append(error.message);
  }
  if (history.length === messages.length - 1 && answer.hasOutput) history = [...messages, answer.message];
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
}

function add(kind) {
  const element = document.createElement("div");
  element.className = `message ${kind}`;
  list.append(element);
  list.scrollTop = list.scrollHeight;
  return element;
}

class Answer {
  #element; #content; #reasoning = null; #calls = [];
  constructor(element) {
    this.#element = element;
    this.#content = element.appendChild(document.createElement("span"));
    this.text = "";
  }

  get hasOutput() {
    return Boolean(this.text || this.#calls.length);
  }

  get message() {
    const calls = this.#calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: "assistant", content: this.text, ...(calls.length && { tool_calls: calls }) };
  }

  push({ delta, logprobs }) {
    const near = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    const entries = logprobs?.content ?? [];
    if (delta.reasoning_content) tokens(this.#thoughts(), delta.reasoning_content, entries);
    if (delta.content) {
      this.text += delta.content;
      tokens(this.#content, delta.content, delta.reasoning_content ? [] : entries);
    }
    for (const call of delta.tool_calls ?? []) this.#call(call);
    if (near) list.scrollTop = list.scrollHeight;
  }

  #thoughts() {
    if (!this.#reasoning) {
      const details = document.createElement("details");
      details.open = true;
      details.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }));
      this.#reasoning = details.appendChild(document.createElement("span"));
      this.#element.prepend(details);
    }
    return this.#reasoning;
  }

  #call({ index, id, function: said }) {
    let call = this.#calls[index];
    if (!call) {
      call = this.#calls[index] = { id, name: said.name, text: "", element: document.createElement("pre") };
      this.#element.append(call.element);
    }
    call.text += said?.arguments ?? "";
    call.element.textContent = `${call.name}(${call.text})`;
  }
}

/** Append text. Each token becomes an element with its alternatives, if the tokens make up the text. */
function tokens(parent, text, entries) {
  const parts = entries.map((entry) => entry.token).join("") === text ? entries.map((entry) => [entry.token, [entry]]) : [[text, entries]];
  for (const [part, of] of parts) {
    if (!of.length) {
      parent.append(part);
      continue;
    }
    const span = document.createElement("span");
    span.textContent = part;
    span.className = Math.exp(of[0].logprob) < 0.5 ? "token unsure" : "token";
    span.tabIndex = parent.querySelector(".token") ? -1 : 0; // arrow keys reach the others
    span.entries = of;
    parent.append(span);
  }
}

function describe(entries) {
  const percent = (entry) => `${(100 * Math.exp(entry.logprob)).toFixed(1).padStart(5)} %  ${JSON.stringify(entry.token)}`;
  return entries
    .map((entry) => {
      const others = (entry.top_logprobs ?? []).filter((other) => other.token !== entry.token);
      return [`${percent(entry)}  chosen`, ...others.map(percent)].join("\n");
    })
    .join("\n\n");
}

function show(token) {
  tooltip.textContent = describe(token.entries);
  tooltip.hidden = false;
  const box = token.getBoundingClientRect(), own = tooltip.getBoundingClientRect();
  const below = box.bottom + own.height + 6 < innerHeight;
  tooltip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 4))}px`;
  tooltip.style.top = `${below ? box.bottom + 4 : box.top - own.height - 4}px`;
  token.setAttribute("aria-describedby", "tooltip");
}

const hide = () => (tooltip.hidden = true);
for (const kind of ["mouseover", "focusin"]) {
  list.addEventListener(kind, ({ target }) => (target.entries ? show(target) : hide()));
}
list.addEventListener("mouseleave", hide);
list.addEventListener("focusout", hide);
list.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !event.target.entries) return;
  const all = [...event.target.parentElement.querySelectorAll(".token")];
  all[all.indexOf(event.target) + step]?.focus();
  event.preventDefault();
});
