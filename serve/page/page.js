// The chat and its settings. No build step, nothing from other hosts; text never becomes HTML.

import { $, call, element, seconds } from "./common.js";
import { poll } from "./figures.js";

// Server-sent events as objects; the last one must be [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off: the connection has ended.");
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

const turns = []; // { question, answer, box }
let running = null; // aborts the answer that is under way

function chosen(id) {
  const text = $(id).value.trim();
  return text === "" ? undefined : text;
}

function number(id) {
  const text = chosen(id);
  return text === undefined ? undefined : Number(text);
}

function request(turn) {
  const said = turns.slice(0, turns.indexOf(turn)).filter(({ answer }) => answer);
  const history = said.flatMap(({ question, answer }) => [
    { role: "user", content: question },
    { role: "assistant", content: answer },
  ]);
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

function send(question) {
  if (running || !question.trim()) return;
  const box = element("article", "turn");
  box.append(element("div", "question", question));
  $("welcome").hidden = true;
  $("log").append(box);
  const turn = { question, answer: "", box };
  turns.push(turn);
  $("message").value = "";
  answer(turn);
}

async function answer(turn) {
  const aborter = (running = new AbortController());
  const [text, figures] = [element("div", "answer"), element("p", "figures")];
  const seen = { text, figures, asked: performance.now(), first: 0, last: 0, early: 0, tokens: 0, depth: 0 };
  const body = request(turn);
  seen.lossy = body.speculation.acceptance === "typical";
  turn.answer = "";
  turn.box.replaceChildren(turn.box.firstChild, text, figures);
  busy(turn, "The model answers.");
  let outcome = "The answer is complete.";
  try {
    const response = await call("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal: aborter.signal,
    });
    for await (const chunk of events(response.body)) follow(() => take(turn, seen, chunk));
  } catch (error) {
    outcome = error.name === "AbortError" ? "Stopped." : "There is an error.";
    if (error.name === "AbortError") tell(seen, { ending: "stopped" });
    else follow(() => turn.box.append(Object.assign(element("p", "error", error.message), { role: "alert" })));
  }
  if (running === aborter) running = null;
  busy(turn, outcome);
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
  const pieces = choice?.pieces ?? [[choice?.delta.content ?? "", false]];
  for (const [text, drafted] of pieces) {
    seen.depth = drafted ? seen.depth + 1 : 0; // every step ends with a token of the model itself
    turn.answer += text;
    if (!drafted) {
      seen.text.append(text);
      continue;
    }
    const span = element("span", "drafted", text);
    span.dataset.depth = Math.min(seen.depth, 4);
    seen.text.append(span);
  }
  if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
  if (choice && seen.tokens) {
    seen.last = performance.now();
    seen.first ||= seen.last;
    seen.early ||= seen.tokens;
  }
  seen.ending = choice?.finish_reason === "length" ? "cut at the limit" : seen.ending;
  tell(seen, { ending: seen.ending, drafts: chunk.metrics?.speculative_decoding });
}

// The line under an answer.
function tell(seen, { ending, drafts }) {
  const rate = ((seen.tokens - seen.early) / (seen.last - seen.first)) * 1000;
  const parts = [`${seen.tokens} token${seen.tokens === 1 ? "" : "s"}`];
  if (rate > 0 && rate < Infinity) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (drafts) parts.push(`${drafts.mean_acceptance_length.toFixed(2)} tokens per step`);
  if (drafts) {
    const { num_accepted_draft_tokens: accepted, num_draft_tokens: drafted } = drafts;
    parts.push(drafted ? `${accepted} of ${drafted} drafted accepted` : "nothing drafted");
  }
  if (seen.first) parts.push(`first after ${seconds((seen.first - seen.asked) / 1000)}`);
  if (ending) parts.push(ending);
  seen.figures.textContent = parts.join(" · ");
  if (seen.lossy) seen.figures.append(" · ", element("span", "warning", "LOSSY"));
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
$("again").onclick = () => !running && turns.length && answer(turns.at(-1));
$("reset").onclick = () => {
  running?.abort();
  running = null;
  turns.splice(0).forEach(({ box }) => box.remove());
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
listModels();
poll();
setInterval(poll, 1000);
document.onvisibilitychange = poll;
