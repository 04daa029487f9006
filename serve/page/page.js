// The chat, its settings and the live figures. No build step, nothing from other hosts; text never becomes HTML.

const WINDOW = 60; // seconds that the figures look back
const $ = (id) => document.getElementById(id);

function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  if (answer.ok) return answer;
  if (answer.status === 401) $("key-field").hidden = false;
  const text = await answer.text();
  throw new Error(`${answer.status}: ${message(text)}`);
}

function message(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || "no reason is given";
  }
}

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
    const chosen = $("model").value;
    const options = data.map(({ id }) => Object.assign(element("option", "", id), { value: id }));
    $("model").replaceChildren(...options);
    if (data.some(({ id }) => id === chosen)) $("model").value = chosen;
    const told = Object.fromEntries(data.map((model) => [model.id, model]));
    $("model").onchange = () => describe(told[$("model").value]);
    $("model").onchange();
    $("key-field").hidden = !sessionStorage.getItem("key");
  } catch (error) {
    $("about").textContent = error.message;
  }
}

function describe({ id, heads, max_model_len }) {
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

const samples = []; // what /metrics told in the last WINDOW seconds: { time, figures }
let polling = false;

// Prometheus' text as { name: [{ labels, value }] }, less the prefix.
function parse(text) {
  const figures = {};
  for (const [, name, inside, value] of text.matchAll(/^medusa:(\w+)(?:\{(.*)\})? (\S+)/gm)) {
    const labels = Object.fromEntries([...(inside ?? "").matchAll(/(\w+)="([^"]*)"/g)].map((pair) => pair.slice(1)));
    (figures[name] ??= []).push({ labels, value: value === "+Inf" ? Infinity : Number(value) });
  }
  return figures;
}

const total = (figures, name) => (figures[name] ?? []).reduce((sum, { value }) => sum + value, 0);

// Counts by a label, { label: count }, those before taken away.
function counts(now, before, name, label) {
  const found = {};
  const add = ({ labels, value }, sign) => (found[labels[label]] = (found[labels[label]] ?? 0) + sign * value);
  now[name]?.forEach((figure) => add(figure, 1));
  before[name]?.forEach((figure) => add(figure, -1));
  return found;
}

// The middle of a histogram as Prometheus' histogram_quantile guesses it.
function median(buckets) {
  const edges = Object.entries(buckets).map(([edge, count]) => [edge === "+Inf" ? Infinity : Number(edge), count]);
  edges.sort(([a], [b]) => a - b);
  const half = (edges.at(-1)?.[1] ?? 0) / 2;
  if (!half) return NaN;
  const place = edges.findIndex(([, count]) => count >= half);
  const [low, below] = place ? edges[place - 1] : [0, 0];
  const [high, count] = edges[place];
  return high === Infinity ? low : low + ((high - low) * (half - below)) / (count - below);
}

const show = (id, text) => ($(id).textContent = text);
const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "–");
const seconds = (value) =>
  !Number.isFinite(value) ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;

async function poll() {
  if (document.hidden || polling) return;
  polling = true;
  try {
    const figures = parse(await (await call("metrics")).text());
    const [latest, tokens] = [samples.at(-1)?.figures ?? {}, "generation_tokens_total"];
    if (total(figures, tokens) < total(latest, tokens)) samples.length = 0; // the server has started anew
    samples.push({ time: performance.now() / 1000, figures });
    while (samples.at(-1).time - samples[0].time > WINDOW) samples.shift();
    draw(figures);
  } catch {
    ["rate", "requests-running", "requests-waiting", "cache"].forEach((id) => show(id, "–"));
  }
  polling = false;
}

function draw(now) {
  drawRates();
  show("requests-running", total(now, "num_requests_running"));
  show("requests-waiting", total(now, "num_requests_waiting"));
  show("cache", percent(now.kv_cache_usage_perc ? total(now, "kv_cache_usage_perc") : NaN));

  // The last minute, where requests have ended in it.
  const ended = "e2e_request_latency_seconds_count";
  const oldest = samples[0].figures;
  const recent = total(now, ended) > total(oldest, ended);
  const before = recent ? oldest : {};
  const grown = (name) => total(now, name) - total(before, name);
  const steps = grown("spec_decode_num_drafts_total");
  const accepted = grown("spec_decode_num_accepted_tokens_total");
  show("period", recent ? "In the last minute" : "Since the server's start");
  show("per-step", steps ? (1 + accepted / steps).toFixed(2) : "–");
  show("accepted", percent(accepted / grown("spec_decode_num_draft_tokens_total")));
  show("first", seconds(median(counts(now, before, "time_to_first_token_seconds_bucket", "le"))));
  show("prefix", percent(grown("prefix_cache_hits_total") / grown("prefix_cache_queries_total")));
  drawDepths(counts(now, before, "spec_decode_num_accepted_tokens_per_pos_total", "position"), steps);
}

function drawRates() {
  const told = (sample) => total(sample.figures, "generation_tokens_total");
  const rates = samples.slice(1).map((sample, index) => {
    const from = samples[Math.max(0, index - 1)]; // two seconds: a step may take a good part of one
    return { time: sample.time, rate: (told(sample) - told(from)) / (sample.time - from.time) };
  });
  if (!rates.length) return;
  show("rate", rates.at(-1).rate.toFixed(rates.at(-1).rate < 100 ? 1 : 0));
  const most = Math.max(1, ...rates.map(({ rate }) => rate));
  const x = (time) => (WINDOW - (rates.at(-1).time - time)).toFixed(2);
  const points = rates.map(({ time, rate }) => `${x(time)},${(19.5 - (18 * rate) / most).toFixed(2)}`);
  $("line").setAttribute("points", points.join(" "));
  $("area").setAttribute("points", `${x(rates[0].time)},20 ${points.join(" ")} ${WINDOW},20`);
}

function drawDepths(reached, steps) {
  const rows = Object.entries(reached).filter(([, count]) => count > 0 && steps);
  rows.sort(([a], [b]) => a - b);
  const items = rows.map(([position, count]) => {
    const [item, bar, inside] = [element("li"), element("span", "bar"), element("i")];
    inside.style.width = `${(100 * count) / steps}%`;
    bar.append(inside);
    item.append(element("span", "", String(Number(position) + 1)), bar, element("b", "", percent(count / steps)));
    return item;
  });
  $("depths").replaceChildren(...(items.length ? items : [element("li", "none", "nothing drafted")]));
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
