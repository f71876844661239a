// Talk to the server. Knows nothing about the page. Keys live in this module's memory and nowhere else.

let key = "";

export const useKey = (value) => { key = value; };

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask for JSON, and give it; an error of the server is thrown with its own words. */
export async function ask(path, { method = "GET", body, admin, signal } = {}) {
  return (await send(path, { method, body, admin, signal })).json();
}

export const post = (path, body, more = {}) => ask(path, { method: "POST", body, ...more });

async function send(path, { method, body, admin, signal }) {
  const headers = {};
  const bearer = admin ?? key;
  if (bearer) headers.Authorization = `Bearer ${bearer}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /ByteString|ISO-8859|code point/i.test(error.message)) {
      throw new ServerError(0, "A key is made of plain letters, digits and signs.");
    }
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (answer.ok) return answer;
  let said = `The server answered ${answer.status}.`;
  try {
    said = (await answer.json()).error.message;
  } catch {
    // It is not ours; the number has to do.
  }
  if (answer.status === 401 && admin === undefined) document.dispatchEvent(new CustomEvent("key-needed"));
  throw new ServerError(answer.status, said);
}

/** Ask for a stream, and give its chunks as they come. */
export async function* stream(path, body, { signal } = {}) {
  const answer = await send(path, { method: "POST", body: { ...body, stream: true }, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError(0, "The server stopped in the middle of the text.");
      kept += value;
      const events = kept.split("\n\n");
      kept = events.pop();
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
