// What the chat and the figures share.

export const GONE = "The server does not answer: it has ended, or cannot be reached. Start it again, then Regenerate.";

export const $ = (id) => document.getElementById(id);

export function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

export async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error(GONE);
  });
  if (answer.ok) return answer;
  if (answer.status === 401) $("key-field").hidden = false;
  const text = await answer.text();
  const { message, code } = told(text);
  throw Object.assign(new Error(`${answer.status}: ${message}`), { code });
}

function told(text) {
  try {
    const { message, code } = JSON.parse(text).error;
    return { message, code };
  } catch {
    return { message: text || "no reason is given" };
  }
}

export const seconds = (value) =>
  !Number.isFinite(value) ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
