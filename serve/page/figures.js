// The live figures, from /metrics.

import { $, call, element, seconds } from "./common.js";

const WINDOW = 60; // seconds that the figures look back
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

// Ask once more; a server that has come back is told of.
export async function poll(returned) {
  if (document.hidden || polling) return;
  polling = true;
  try {
    const figures = parse(await (await call("metrics")).text());
    const [latest, tokens] = [samples.at(-1)?.figures ?? {}, "generation_tokens_total"];
    if (total(figures, tokens) < total(latest, tokens)) samples.length = 0; // the server has started anew
    samples.push({ time: performance.now() / 1000, figures });
    while (samples.at(-1).time - samples[0].time > WINDOW) samples.shift();
    draw(figures);
    if (!$("gone").hidden) returned();
    gone(false);
  } catch {
    gone(true);
    ["rate", "requests-running", "requests-waiting", "cache"].forEach((id) => show(id, "–"));
  }
  polling = false;
}

function gone(is) {
  $("gone").hidden = !is;
  $("about").hidden = is;
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
