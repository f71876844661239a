// The documents of the store: list, read, add, remove.

import { fetchJson, post } from "./api.js";
import { showError, clearErrors, count, find, make, plural } from "./dom.js";
import { openPassage } from "./inspector.js";

const PAGE = 50;
let shown = 0;
let requests = 0;
const REQUEST_PAIRS = 256; // in one request
let maxBytes = Infinity; // of a request
let pairs = false;

/** Set the limits of the server. */
export function prepare(metadata) {
  maxBytes = metadata.max_body_bytes;
  pairs = Boolean(metadata.pairs);
  if (pairs) find("drop-what").textContent = "Drop .tsv files here: source, tab, translation on each line";
}

/** Add the listeners of the tab. */
export function begin() {
  let waiting = 0;
  find("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => list(), 150);
  });
  find("more").addEventListener("click", () => list({ more: true }));
  find("files").addEventListener("change", () => {
    add([...find("files").files]);
    find("files").value = "";
  });
  const drop = find("drop");
  for (const kind of ["dragenter", "dragover"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
  // A file dropped elsewhere must not replace the page.
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());
}

/** Show the first documents, or more of them. */
export async function list({ more = false } = {}) {
  const query = find("search").value;
  const own = ++requests;
  const offset = more ? shown : 0;
  try {
    const answer = await fetchJson(`/v1/documents?query=${encodeURIComponent(query)}&offset=${offset}&limit=${PAGE}`);
    if (own !== requests) return; // a later search is running
    const rows = answer.documents.map(row);
    if (more) find("document-list").append(...rows);
    else find("document-list").replaceChildren(...rows);
    shown = offset + rows.length;
    find("total").textContent = count(answer.total);
    find("nothing").hidden = answer.total > 0;
    find("more").hidden = shown >= answer.total;
  } catch (error) {
    showError(error);
  }
}

function row(document) {
  const name = make("button", { type: "button", class: "document", onclick: () => openPassage(document.number) },
    make("span", { text: document.id }));
  const where = document.source_text ?? (document.source === document.id ? "" : document.source);
  return make("li", {}, make("div", { class: "title" }, name, make("small", { text: where })),
    make("span", { class: "size", text: plural(document.tokens, "token") }),
    make("button", {
      type: "button", class: "quiet small", text: "Remove", "aria-label": `Remove ${document.id}`, onclick: () => remove(document),
    }));
}

async function add(files) {
  clearErrors();
  for (const [place, file] of files.entries()) {
    const line = make("li", { text: `Reading ${file.name}…` });
    find("added").prepend(line);
    try {
      const text = await readText(file);
      const documents = pairs ? readPairs(file.name, text) : [{ id: file.name, source: file.name, text }];
      const result = await send(file.name, documents);
      const added = pairs ? `${plural(result.added, "pair")} with ${plural(result.tokens, "token")}` : plural(result.tokens, "token");
      line.textContent = result.added
        ? `${file.name}: ${added} added.`
        : `${file.name}: ${pairs ? "these pairs are" : "this text is"} in the store already.`;
      line.className = "done";
      await list();
    } catch (error) {
      line.textContent = `${file.name}: not added. ${error.message}`;
      showError(error);
      if (![0, 401, 403].includes(error.status)) continue; // an error of this file only
      for (const other of files.slice(place + 1)) find("added").prepend(make("li", { text: `${other.name}: not added.` }));
      return;
    }
  }
}

/** Add documents, in several requests where there are many, and return the totals. */
async function send(name, documents) {
  const totals = { added: 0, tokens: 0 };
  for (let begin = 0; begin < documents.length; begin += REQUEST_PAIRS) {
    const body = { documents: documents.slice(begin, begin + REQUEST_PAIRS) };
    if (new Blob([JSON.stringify(body)]).size > maxBytes) {
      // A browser does not show the error of a server that rejects a body while it arrives.
      throw new Error(`${name} is larger than the limit of ${count(maxBytes)} bytes. Split it.`);
    }
    const result = await post("/v1/documents", body, { admin: find("admin").value });
    totals.added += result.added;
    totals.tokens += result.tokens;
  }
  return totals;
}

/** Return the pairs of a file with a source, a tab and a translation on each line. */
function readPairs(name, text) {
  const found = [];
  for (const [number, line] of text.split(/\r?\n/).entries()) {
    if (!line.trim()) continue;
    const [source, target, ...others] = line.split("\t");
    if (!source.trim() || !target?.trim() || others.length) {
      throw new Error(`${name}, line ${number + 1}: a pair is a source, one tab and a translation.`);
    }
    const id = `${name}:${number + 1}`;
    found.push({ id, source: id, text: target, source_text: source });
  }
  return found;
}

async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.trim() && !text.includes("\0")) return text;
  } catch {
    // Reported below.
  }
  throw new Error(`${file.name} is not UTF-8 text, or is empty. Choose a text file.`);
}

async function remove(document) {
  if (!(await confirmRemoval(document))) return;
  clearErrors();
  try {
    await fetchJson(`/v1/documents/${document.number}`, { method: "DELETE", admin: find("admin").value });
    find("added").prepend(make("li", { class: "done", text: `${document.id}: removed.` }));
    await list();
  } catch (error) {
    showError(error);
  }
}

/** Return whether the removal is confirmed. */
function confirmRemoval(document) {
  const dialog = find("confirm");
  find("confirm-text").textContent = `“${document.id}” (${plural(document.tokens, "token")}) will be removed from the store.`;
  return new Promise((resolve) => {
    const yes = () => dialog.close("yes");
    find("confirm-yes").addEventListener("click", yes);
    dialog.addEventListener("close", () => {
      find("confirm-yes").removeEventListener("click", yes);
      resolve(dialog.returnValue === "yes");
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
}
