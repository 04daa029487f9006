// The chat and its settings. No build step, nothing from other hosts.

import { $, call, element, GONE, seconds } from "./common.js";
import { poll } from "./figures.js";
import { show } from "./markdown.js";

// Server-sent events as objects; the last one must be [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) await broken();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function broken(error) {
  if (error?.name === "AbortError") throw error;
  const runs = await fetch("health").then(({ ok }) => ok, () => false);
  throw new Error(runs ? "The connection broke off; the server still runs. Regenerate asks again." : GONE);
}

async function listModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    fill("model", data.map(({ id }) => id));
    const told = Object.fromEntries(data.map((model) => [model.id, model]));
    $("model").onchange = () => describe(told[$("model").value]);
    $("model").onchange();
    $("key-field").hidden = !sessionStorage.getItem("key");
  } catch (error) {
    $("about").textContent = error.message;
  }
}

// Options of a field, the chosen one again where it is still there.
function fill(id, names, before = []) {
  const chosen = $(id).value;
  $(id).replaceChildren(...before, ...names.map((name) => Object.assign(element("option", "", name), { value: name })));
  if (names.includes(chosen)) $(id).value = chosen;
}

function describe({ id, heads, drafters, max_model_len }) {
  fill("drafter", drafters, [Object.assign(element("option", "", "auto"), { value: "" })]);
  const drafts = heads ? `${heads.num_heads} ${heads.architecture} heads` : "no heads";
  $("about").textContent = `${id} · ${drafts} · ${max_model_len.toLocaleString("en")} tokens of context`;
}

const turns = []; // { question, pieces: [text, depth], figures, lossy, error, box }
let running = null; // aborts the answer that is under way
let forgotten = 0; // oldest turns that have left the context

function chosen(id) {
  const text = $(id).value.trim();
  return text === "" ? undefined : text;
}

function number(id) {
  const text = chosen(id);
  return text === undefined ? undefined : Number(text);
}

function before(turn) {
  return turns.slice(0, turns.indexOf(turn)).filter(({ pieces }) => pieces.length);
}

function request(turn) {
  const history = before(turn).slice(forgotten).flatMap(({ question, pieces }) => [
    { role: "user", content: question },
    { role: "assistant", content: pieces.map(([text]) => text).join("") },
  ]);
  if (chosen("system")) history.unshift({ role: "system", content: chosen("system") });
  const drafting = { drafter: chosen("drafter"), nodes: number("nodes"), acceptance: chosen("acceptance") };
  const enabled = $("speculation").checked;
  return {
    model: chosen("model"),
    messages: [...history, { role: "user", content: turn.question }],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    speculation: { enabled, trace: true, metrics: true, ...(enabled && drafting) },
  };
}

// The oldest turns leave a conversation that outgrows the context, one after the other.
async function ask(turn, signal) {
  const kept = forgotten;
  for (;;) {
    try {
      return await call("v1/chat/completions", { method: "POST", body: JSON.stringify(request(turn)), signal });
    } catch (error) {
      if (error.code === "context_length_exceeded" && forgotten++ < before(turn).length) continue;
      if (!signal.aborted) forgotten = kept; // a new chat has begun anew
      throw error;
    }
  }
}

function send(question) {
  if (running || !question.trim()) return;
  const turn = { question, pieces: [], thoughts: "", figures: "" };
  add(turn);
  $("message").value = "";
  answer(turn);
}

function add(turn) {
  turn.box = element("article", "turn");
  turns.push(turn);
  $("welcome").hidden = true;
  $("log").append(turn.box);
  draw(turn);
}

function draw(turn) {
  const question = Object.assign(element("div", "question", turn.question), { dir: "auto" });
  const thoughts = element("details", "thoughts");
  thoughts.append(element("summary", "", "Reasoning"), Object.assign(element("p", ""), { dir: "auto" }));
  turn.box.replaceChildren(question, thoughts, element("div", "answer"), element("p", "figures"));
  refresh(turn);
}

function refresh({ box, pieces, thoughts, figures, lossy, error }) {
  const [, reasoning, text, line, alert] = box.children;
  reasoning.hidden = !thoughts;
  reasoning.lastChild.textContent = thoughts;
  if (pieces.length && !reasoning.answered) reasoning.open = false; // a reader may open it again
  if (thoughts && !pieces.length) reasoning.open = true;
  reasoning.answered = pieces.length > 0;
  show(text, pieces);
  line.textContent = figures;
  if (lossy) line.append(" · ", element("span", "warning", "LOSSY"));
  alert?.remove();
  if (error) box.append(Object.assign(element("p", "error", error), { role: "alert" }));
}

async function answer(turn) {
  const aborter = (running = new AbortController());
  const seen = { asked: performance.now(), first: 0, last: 0, early: 0, tokens: 0, depth: 0, drawing: false };
  const lossy = request(turn).speculation.acceptance === "typical";
  Object.assign(turn, { pieces: [], thoughts: "", figures: "", error: "", lossy });
  draw(turn);
  busy(turn, "The model answers.");
  let outcome = "The answer is complete.";
  try {
    const response = await ask(turn, aborter.signal);
    for await (const chunk of events(response.body)) take(turn, seen, chunk);
  } catch (error) {
    outcome = error.name === "AbortError" ? "Stopped." : "There is an error.";
    if (error.name === "AbortError") tell(turn, seen, { ending: "stopped" });
    else turn.error = error.message;
  }
  if (running === aborter) running = null;
  follow(() => refresh(turn));
  busy(turn, outcome);
  save();
}

function busy(turn, status) {
  turn.box.setAttribute("aria-busy", String(running !== null));
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("again").disabled = running !== null || !turns.length;
  $("status").textContent = status;
  follow(() => {}, true);
}

function take(turn, seen, chunk) {
  const [choice] = chunk.choices;
  turn.thoughts += choice?.delta.reasoning_content ?? "";
  const pieces = choice?.pieces ?? [[choice?.delta.content ?? "", false]];
  for (const [text, drafted] of pieces) {
    seen.depth = drafted ? Math.min(seen.depth + 1, 4) : 0; // every step ends with a token of the model itself
    if (turn.pieces.at(-1)?.[1] === seen.depth) turn.pieces.at(-1)[0] += text;
    else if (text) turn.pieces.push([text, seen.depth]);
  }
  if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
  if (choice && seen.tokens) {
    seen.last = performance.now();
    seen.first ||= seen.last;
    seen.early ||= seen.tokens;
  }
  seen.ending = choice?.finish_reason === "length" ? "cut at the limit" : seen.ending;
  tell(turn, seen, { ending: seen.ending, drafts: chunk.metrics?.speculative_decoding });
  if (seen.drawing) return;
  seen.drawing = true; // once for all chunks of a frame
  requestAnimationFrame(() => {
    seen.drawing = false;
    follow(() => refresh(turn));
  });
}

// The line under an answer.
function tell(turn, seen, { ending, drafts }) {
  const rate = ((seen.tokens - seen.early) / (seen.last - seen.first)) * 1000;
  const parts = [`${seen.tokens} token${seen.tokens === 1 ? "" : "s"}`];
  if (rate > 0 && rate < Infinity) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (drafts) parts.push(`${drafts.mean_acceptance_length.toFixed(2)} tokens per step`);
  if (drafts) {
    const { num_accepted_draft_tokens: accepted, num_draft_tokens: drafted } = drafts;
    parts.push(drafted ? `${accepted} of ${drafted} drafted accepted` : "nothing drafted");
  }
  if (forgotten) parts.push(`without the oldest ${forgotten} turn${forgotten === 1 ? "" : "s"}`);
  if (seen.first) parts.push(`first after ${seconds((seen.first - seen.asked) / 1000)}`);
  if (ending) parts.push(ending);
  turn.figures = parts.join(" · ");
}

// The conversation survives a reload of its tab, and no longer.
function save() {
  const kept = turns.map(({ box, ...turn }) => turn);
  if (running) kept.at(-1).figures += " · stopped by a reload";
  try {
    sessionStorage.setItem("conversation", JSON.stringify({ turns: kept, system: $("system").value }));
  } catch {
    sessionStorage.removeItem("conversation"); // larger than what a browser keeps
  }
}

function restore() {
  const { turns: kept, system } = JSON.parse(sessionStorage.getItem("conversation") ?? '{"turns": [], "system": ""}');
  $("system").value = system;
  kept.forEach(add);
  $("again").disabled = !kept.length;
  follow(() => {}, true);
}

// Keep the end of the conversation in sight, unless the reader has scrolled away from it.
function follow(change, always = false) {
  const log = $("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (near || always) log.scrollTop = log.scrollHeight;
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  send($("message").value);
};
$("message").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("message").value);
};
$("examples").onclick = (event) => event.target.matches("button") && send(event.target.textContent);
$("stop").onclick = () => running?.abort();
document.addEventListener("keydown", ({ key, isComposing }) => key === "Escape" && !isComposing && running?.abort());
onpagehide = save;
$("again").onclick = () => !running && turns.length && answer(turns.at(-1));
$("reset").onclick = () => {
  running?.abort();
  running = null;
  turns.splice(0).forEach(({ box }) => box.remove());
  forgotten = 0;
  save();
  $("welcome").hidden = false;
  $("again").disabled = true;
  $("message").focus();
};
$("coloured").onchange = () => document.body.classList.toggle("plain", !$("coloured").checked);
$("speculation").onchange = () => ($("drafting").disabled = !$("speculation").checked);
$("acceptance").onchange = () => ($("lossy").hidden = $("acceptance").value !== "typical");
$("settings").onsubmit = (event) => event.preventDefault();
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").onchange = () => {
  sessionStorage.setItem("key", $("key").value.trim());
  listModels();
};
for (const id of ["coloured", "speculation", "acceptance"]) $(id).onchange(); // browsers keep fields over a reload
const narrow = matchMedia("(max-width: 50rem)").matches;
document.querySelectorAll("details").forEach((part) => (part.open = !narrow));
const look = () => poll(listModels);
restore();
listModels();
look();
setInterval(look, 1000);
document.onvisibilitychange = look;
