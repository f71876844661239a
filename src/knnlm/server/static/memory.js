// The documents of the memory: look through them, read them, add and remove some.

import { ask, post } from "./api.js";
import { complain, content, count, find, make, plural } from "./dom.js";
import { openPassage } from "./inspector.js";

const PAGE = 50;
let shown = 0;
let asking = 0;
let largest = Infinity; // bytes that the server takes at once

/** Take note of what the server says of itself. */
export function prepare(facts) {
  largest = facts.max_body_bytes;
}

/** Take charge of the tab. */
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
  // A file that misses the field must not open in the place of the page.
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());
}

/** Show documents, from the first or after those that are shown. */
export async function list({ more = false } = {}) {
  const query = find("search").value;
  const turn = ++asking;
  const offset = more ? shown : 0;
  try {
    const answer = await ask(`/v1/documents?query=${encodeURIComponent(query)}&offset=${offset}&limit=${PAGE}`);
    if (turn !== asking) return; // another search was begun meanwhile
    const rows = answer.documents.map(row);
    if (more) find("shelf").append(...rows);
    else find("shelf").replaceChildren(...rows);
    shown = offset + rows.length;
    find("total").textContent = count(answer.total);
    find("nothing").hidden = answer.total > 0;
    find("more").hidden = shown >= answer.total;
  } catch (error) {
    complain(error);
  }
}

function row(document) {
  const name = make("button", { type: "button", class: "document", onclick: () => openPassage(document.number) },
    make("span", { text: document.id }));
  const where = document.source === document.id ? "" : document.source;
  return make("li", {}, make("div", { class: "title" }, name, make("small", { text: where })),
    make("span", { class: "size", text: plural(document.tokens, "token") }),
    make("button", {
      type: "button", class: "quiet small", text: "Remove", "aria-label": `Remove ${document.id}`, onclick: () => remove(document),
    }));
}

async function add(files) {
  content();
  for (const [place, file] of files.entries()) {
    const line = make("li", { text: `Reading ${file.name}…` });
    find("added").prepend(line);
    try {
      const text = await readText(file);
      const body = { documents: [{ id: file.name, source: file.name, text }] };
      if (new Blob([JSON.stringify(body)]).size > largest) {
        // A server that refuses a body while it is coming cannot say so to a browser.
        throw new Error(`${file.name} is larger than the ${count(largest)} bytes that the server takes at once. Cut it in pieces.`);
      }
      const made = await post("/v1/documents", body, { admin: find("admin").value });
      line.textContent = made.added
        ? `${file.name}: ${plural(made.tokens, "token")} remembered.`
        : `${file.name}: this text is there already.`;
      line.className = "done";
      await list();
    } catch (error) {
      line.textContent = `${file.name}: not remembered. ${error.message}`;
      complain(error);
      if (![0, 401, 403].includes(error.status)) continue; // it is this file's fault
      for (const other of files.slice(place + 1)) find("added").prepend(make("li", { text: `${other.name}: not remembered.` }));
      return;
    }
  }
}

async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.trim() && !text.includes("\0")) return text;
  } catch {
    // Said below.
  }
  throw new Error(`${file.name} is no text in UTF-8, or is empty. Choose a text file.`);
}

async function remove(document) {
  if (!(await sure(document))) return;
  content();
  try {
    await ask(`/v1/documents/${document.number}`, { method: "DELETE", admin: find("admin").value });
    find("added").prepend(make("li", { class: "done", text: `${document.id}: forgotten.` }));
    await list();
  } catch (error) {
    complain(error);
  }
}

/** Ask before something is gone. */
function sure(document) {
  const dialog = find("confirm");
  find("confirm-text").textContent = `“${document.id}” (${plural(document.tokens, "token")}) will not be heard any more.`;
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
