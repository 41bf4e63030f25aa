// The live picture: steps, queue, KV blocks and latencies. The server sends ids and token counts only.

import { events, onKey, request } from "./api.js";

const at = (id) => document.getElementById(id);
const canvas = at("steps"), connection = at("connection");
const dark = matchMedia("(prefers-color-scheme: dark)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
// Distinct also to colour-blind people; each differs enough from the ground of its scheme.
const LIGHT = ["#0072b2", "#c04a00", "#008060", "#a8327a", "#806000", "#5a4fcf", "#2f7f9f", "#8c3b3b"];
const DARK = ["#56b4e9", "#f0883e", "#2fc79a", "#e58cc0", "#e6c84b", "#a99bff", "#7fd3e6", "#e88c8c"];
const MOST_STEPS = 400, BAR = 9, GAP = 2, TOP = 16;

let limits = null, latest = null, steps = [], chosen = null, paused = false, drawn = 0, scheduled = false;
let dropped = 0;
const numbers = new Map(); // of requests, in the order in which they appeared

function number(id) {
  if (!numbers.has(id)) numbers.set(id, numbers.size + 1);
  return numbers.get(id);
}
const colour = (id) => (dark.matches ? DARK : LIGHT)[(number(id) - 1) % LIGHT.length];
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

// The stream. It is open only while the page is visible: the engine does nothing for a page that nobody sees.
let stream = null;
async function watch() {
  stream?.abort();
  const control = (stream = new AbortController());
  try {
    for await (const event of events("ui/steps", { signal: control.signal })) {
      if (event.error) throw new Error(event.error.message);
      if (event.event === "limits") begin(event);
      else update(event);
    }
    lost("disconnected");
  } catch (error) {
    if (control.signal.aborted) return;
    lost(error.message);
    if (error.status === 401) return; // until the user gives a key
  }
  if (stream === control) setTimeout(() => stream === control && watch(), 2000);
}
function lost(reason) {
  connection.textContent = reason;
  connection.className = "";
}
function begin(event) {
  limits = event;
  connection.textContent = "live";
  connection.className = "live";
  at("model").textContent = event.model;
  scrape();
}
function update(event) {
  latest = event;
  dropped += event.dropped;
  if (!paused) {
    steps.push(...event.steps);
    steps = steps.slice(-MOST_STEPS);
  }
  schedule();
}
function schedule() {
  if (scheduled) return;
  scheduled = true;
  const wait = calm.matches ? Math.max(0, 1000 - (performance.now() - drawn)) : 0;
  setTimeout(() => requestAnimationFrame(draw), wait);
}

function draw() {
  scheduled = false;
  drawn = performance.now();
  drawSteps();
  if (latest) {
    drawQueue();
    drawBlocks();
  }
}

function visible() {
  return steps.slice(-Math.max(1, Math.floor((canvas.clientWidth - 2) / (BAR + GAP))));
}

function drawSteps() {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const budget = limits?.token_budget ?? 1, full = height - TOP - 1;
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = variable("--quiet");
  context.fillText(limits ? `token budget ${budget}` : "", 2, 11);
  context.strokeStyle = variable("--quiet");
  context.setLineDash([4, 4]);
  line(context, 0, TOP - 0.5, width);
  context.setLineDash([]);
  line(context, 0, height - 0.5, width);
  visible().forEach((step, index) => {
    const x = 1 + index * (BAR + GAP);
    let y = height - 1;
    const part = (id, tokens, isPrompt) => {
      const size = Math.max((tokens / budget) * full, isPrompt ? 1 : 2); // one token stays visible
      y -= size;
      if (isPrompt) hatch(context, x, y, BAR, size, colour(id));
      else {
        context.fillStyle = colour(id);
        context.fillRect(x, y, BAR, Math.max(1, size - (size > 3 ? 0.5 : 0)));
      }
    };
    for (const id of step.decodes) part(id, 1, false);
    for (const [id, tokens] of step.prompts) part(id, tokens, true);
    if (step === chosen) {
      context.strokeStyle = variable("--ink");
      context.strokeRect(x - 1.5, TOP + 0.5, BAR + 3, full);
    }
  });
  tell();
}
function line(context, x, y, width) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + width, y);
  context.stroke();
}
function hatch(context, x, y, width, height, ink) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.globalAlpha = 0.28;
  context.fillStyle = ink;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
  context.strokeStyle = ink;
  context.lineWidth = 1.2;
  for (let offset = Math.floor(y / 5) * 5 - width; offset < y + height; offset += 5) {
    context.beginPath();
    context.moveTo(x, offset + width);
    context.lineTo(x + width, offset);
    context.stroke();
  }
  context.strokeRect(x + 0.5, y + 0.5, width - 1, Math.max(0, height - 1));
  context.restore();
}

const name = (id) => `#${number(id)}`;
function tell() {
  const step = chosen ?? steps.at(-1);
  if (!step) return;
  const prompts = step.prompts.map(([id, tokens]) => `${name(id)} ${tokens}`).join(", ");
  const total = step.decodes.length + step.prompts.reduce((sum, [, tokens]) => sum + tokens, 0);
  const share = limits ? ` (${Math.round((100 * total) / limits.token_budget)} % of the budget)` : "";
  at("step-text").textContent =
    `Step ${step.number}: ${total} tokens${share} in ${(1000 * step.seconds).toFixed(1)} ms. ` +
    `${step.decodes.length} decode${prompts ? `; prompts: ${prompts}` : ""}` +
    `${step.preemptions ? `; ${step.preemptions} preempted` : ""}${dropped ? `. ${dropped} steps not shown` : ""}.`;
}

function drawQueue() {
  const state = latest.state, more = state.num_waiting + state.num_swapped - latest.queue.length;
  at("queue-text").textContent =
    `${state.num_running} running, ${state.num_waiting} waiting${state.num_swapped ? `, ${state.num_swapped} swapped` : ""}; ` +
    `backlog ${state.backlog_prompt_tokens} tokens` +
    `${state.oldest_waiting_seconds ? `, the oldest waits ${state.oldest_waiting_seconds.toFixed(1)} s` : ""}`;
  list(at("queue"), latest.queue, "token");
  if (more > 0) at("queue").append(`and ${more} more`);
}
function drawBlocks() {
  const { num_blocks, block_size } = limits, used = latest.state.kv_blocks_used;
  const held = latest.blocks.reduce((sum, [, blocks]) => sum + blocks, 0);
  at("kv-text").textContent =
    `${used} of ${num_blocks} blocks of ${block_size} tokens` + `${held > used ? `; ${held - used} shared` : ""}`;
  const scale = (100 / num_blocks) * (held > used ? used / held : 1);
  at("kv").replaceChildren(
    ...latest.blocks.map(([id, blocks]) => {
      const part = document.createElement("div");
      part.style.width = `${blocks * scale}%`;
      part.style.background = colour(id);
      return part;
    }),
  );
  list(at("owners"), latest.blocks, "block");
}
function list(parent, rows, unit) {
  parent.replaceChildren(
    ...rows.map(([id, count]) => {
      const item = document.createElement("li"), dot = document.createElement("span");
      dot.className = "dot";
      dot.style.background = colour(id);
      item.append(dot, `${name(id)} ${count} ${unit}${count === 1 ? "" : "s"}`);
      item.title = id;
      return item;
    }),
  );
}

// Choosing a step: by mouse or arrow keys.
canvas.addEventListener("mousemove", (event) => {
  choose(visible()[Math.floor((event.offsetX - 1) / (BAR + GAP))] ?? null);
});
canvas.addEventListener("mouseleave", () => choose(null));
canvas.addEventListener("keydown", (event) => {
  const shown = visible(), index = chosen ? shown.indexOf(chosen) : shown.length;
  const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: shown.length - 1, Escape: -1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  if (event.key === "Escape") choose(null);
  else choose(shown[Math.min(shown.length - 1, Math.max(0, next))] ?? null);
});
canvas.addEventListener("blur", () => choose(null));
function choose(step) {
  chosen = step;
  at("step-text").setAttribute("aria-live", document.activeElement === canvas ? "polite" : "off");
  drawSteps();
}
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  at("pause").textContent = paused ? "Continue" : "Pause";
});
new ResizeObserver(schedule).observe(canvas);
dark.addEventListener("change", schedule);

// Histograms: the growth of the server's own since the page was opened.
const METRICS = { first: "fastgen_time_to_first_token_seconds", between: "fastgen_inter_token_latency_seconds" };
const before = {};
let timer = null;
async function scrape() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const query = Object.values(METRICS).map((metric) => `name[]=${metric}_bucket`).join("&");
    const text = await (await request(`metrics?${query}`)).text();
    for (const [id, metric] of Object.entries(METRICS)) {
      const found = [...text.matchAll(new RegExp(`^${metric}_bucket\\{.*le="([^"]+)".*\\} (\\S+)$`, "gm"))];
      drawHistogram(id, found.map(([, bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), Number(count)]));
    }
  } catch {
    // The stream tells what is wrong.
  }
  timer = setTimeout(scrape, 2000);
}
function drawHistogram(id, cumulative) {
  if (!cumulative.length) return;
  const start = (before[id] ??= cumulative);
  const grown = cumulative.map(([bound, count], index) => [bound, Math.max(0, count - (start[index]?.[1] ?? 0))]);
  const total = grown.at(-1)[1];
  const bars = grown.map(([bound, count], index) => [bound, count - (index ? grown[index - 1][1] : 0)]);
  const most = Math.max(1, ...bars.map(([, count]) => count));
  const bound = (share) => duration(grown.find(([, count]) => count >= share * total)[0]);
  at(`${id}-text`).textContent = total
    ? `${total} since this page was opened; half within ${bound(0.5)}, 99 % within ${bound(0.99)}`
    : "none since this page was opened";
  at(id).replaceChildren(
    ...bars.map(([upper, count], index) => {
      const bar = document.createElement("div");
      bar.style.height = `${(100 * count) / most}%`;
      bar.className = count ? "" : "none";
      bar.title = `up to ${duration(upper)}: ${count}`;
      if (index % 5 === 0) bar.append(Object.assign(document.createElement("span"), { textContent: duration(upper) }));
      return bar;
    }),
  );
}
function duration(seconds) {
  if (seconds === Infinity) return "more";
  return seconds < 1 ? `${+(1000 * seconds).toPrecision(3)} ms` : `${seconds} s`;
}

// Long prompts: three short requests decode while a prompt of several budgets is split over steps and fused with them.
const long = at("long");
let sending = null;
long.addEventListener("click", () => {
  const on = !sending;
  long.setAttribute("aria-checked", String(on));
  sending?.abort();
  sending = on ? new AbortController() : null;
  if (on) demonstrate(sending.signal);
});
async function demonstrate(signal) {
  try {
    const post = async (path, body) => (await request(path, { body, signal })).json();
    const sentence = "The quick brown fox jumps over the lazy dog, and the tokens of a long prompt fill many steps.";
    while (!signal.aborted && limits) {
      // A random start, so that the prefix cache has none of it.
      const { tokens } = await post("tokenize", { prompt: `${Math.random()} ${sentence}` });
      const length = Math.min(3 * limits.token_budget, limits.max_model_length - 64);
      const prompt = Array.from({ length }, (_, index) => tokens[index % tokens.length]);
      const short = [1, 2, 3].map((seed) =>
        post("v1/completions", { prompt: tokens, max_tokens: 48, seed, ignore_eos: true }),
      );
      const later = new Promise((resolve) => setTimeout(resolve, 200));
      const last = later.then(() => post("v1/completions", { prompt, max_tokens: 16, ignore_eos: true }));
      await Promise.all([...short, last]);
    }
  } catch (error) {
    if (signal.aborted) return;
    at("step-text").textContent = `Long prompts stopped: ${error.message}`;
    sending = null;
    long.setAttribute("aria-checked", "false");
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream?.abort();
  else watch();
});
onKey(() => setTimeout(watch));
watch();
