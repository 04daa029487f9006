// Answers as Markdown, in which drafted text stays marked. What a model says never becomes HTML of its own: its tags
// are shown as text, and of what Markdown makes, DOMPurify lets these through. vendor/ holds lib/marked.esm.js and
// dist/purify.min.js of the npm packages marked and dompurify as they are, less the line that names a source map.

import { element } from "./common.js";
import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" ");
const escaped = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
const marked = new Marked({
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// Let an element show an answer: pieces [text, depth], depth 0 = not drafted. Blocks that have not changed stay as they
// are, with what a reader has selected in them.
export function show(box, pieces) {
  pieces = pieces.map(([text, depth]) => [text.replaceAll("\r", ""), depth]); // line ends as marked counts them
  const depths = pieces.flatMap(([text, depth]) => new Array(text.length).fill(depth));
  const blocks = [];
  let end = 0;
  for (const token of marked.lexer(pieces.map(([text]) => text).join(""))) {
    end += token.raw.length;
    if (token.type === "space") continue;
    const old = box.children[blocks.length];
    blocks.push(old?.source === token.raw ? old : block(token, depths.slice(end - token.raw.length, end)));
  }
  blocks.forEach((block, index) => {
    const old = box.children[index];
    if (old !== block) old ? old.replaceWith(block) : box.append(block);
  });
  while (box.children.length > blocks.length) box.lastChild.remove();
}

function block(token, depths) {
  const made = Object.assign(element("div", "block"), { dir: "auto" });
  made.source = token.raw;
  const kept = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "align", "start"], RETURN_DOM_FRAGMENT: true };
  made.append(globalThis.DOMPurify.sanitize(marked.parser([token]), kept));
  mark(made, token.raw, depths);
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const code of made.querySelectorAll("pre > code")) head(code);
  return made;
}

// Mark what was drafted. A block's text occurs in its source in the same order, with syntax between.
function mark(made, source, depths) {
  const walker = document.createTreeWalker(made, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (walker.currentNode.data.trim()) nodes.push(walker.currentNode);
  let at = 0; // in the source
  for (const node of nodes) {
    const whole = source.indexOf(node.data, at);
    const runs = []; // [text, depth]
    for (let index = 0; index < node.data.length; index++) {
      const found = whole < 0 ? source.indexOf(node.data[index], at) : whole + index;
      const depth = found < 0 ? 0 : depths[found];
      if (found >= 0) at = found + 1;
      if (runs.at(-1)?.[1] === depth) runs.at(-1)[0] += node.data[index];
      else runs.push([node.data[index], depth]);
    }
    node.replaceWith(...runs.map(([text, depth]) => (depth ? drafted(text, depth) : text)));
  }
}

function drafted(text, depth) {
  const made = element("span", "drafted", text);
  made.dataset.depth = depth;
  return made;
}

// The line above a code block: its language, and a button where the browser lets a page copy.
function head(code) {
  const line = element("div", "code-head", code.className.replace("language-", ""));
  if (navigator.clipboard) {
    const button = Object.assign(element("button", "", "Copy"), { type: "button" });
    button.onclick = async () => {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    };
    line.append(button);
  }
  code.parentElement.before(line);
}
