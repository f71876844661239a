// Requests to the server. Keys are variables of this module and stored nowhere else.

let key = "";

export const useKey = (value) => { key = value; };

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Return the JSON of a response; an error of the server is thrown with its message. */
export async function fetchJson(path, { method = "GET", body, admin, signal } = {}) {
  return (await send(path, { method, body, admin, signal })).json();
}

export const post = (path, body, options = {}) => fetchJson(path, { method: "POST", body, ...options });

async function send(path, { method, body, admin, signal }) {
  const headers = {};
  const bearer = admin ?? key;
  if (bearer) headers.Authorization = `Bearer ${bearer}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /ByteString|ISO-8859|code point/i.test(error.message)) {
      throw new ServerError(0, "A key must consist of ASCII characters.");
    }
    throw new ServerError(0, "The server does not respond. Is it still running?");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not an error in our format: keep the status.
  }
  if (response.status === 401 && admin === undefined) document.dispatchEvent(new CustomEvent("key-needed"));
  throw new ServerError(response.status, message);
}

/** Yield the chunks of a stream as they arrive. */
export async function* stream(path, body, { signal } = {}) {
  const response = await send(path, { method: "POST", body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError(0, "The server stopped in the middle of the text.");
      buffer += value;
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        if (event === "data: [DONE]") return;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new ServerError(500, chunk.error.message);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
