// Server-sent events over fetch, which unlike EventSource can send a key; and a connection that comes back.

const KEY = "isthmus-key";
const SILENCE = 10_000; // milliseconds without a frame after which the connection counts as dead
const LONGEST_PAUSE = 5_000;

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What the server says instead of an answer. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** There was no answer, or it broke off. */
export class Lost extends Error {}

const lost = (error) => {
  throw error.name === "AbortError" ? error : new Lost(error.message);
};

/** fetch with the key; a Refusal for every status but 2xx, Lost when there is no answer. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers }).catch(lost);
  if (response.ok) return response;
  const body = await response.json().catch(() => null); // of a proxy, perhaps: then the status must do
  throw new Refusal(response.status, body?.error?.message ?? `status ${response.status}`);
}

/** The data of each event of an answer, parsed; ends at `[DONE]` or with the answer. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(lost);
      if (done) return;
      const found = (rest + value).split("\n\n");
      rest = found.pop();
      for (const event of found) {
        if (!event.startsWith("data: ")) continue;
        if (event === "data: [DONE]") return;
        yield JSON.parse(event.slice("data: ".length));
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // it has ended already if this fails
  }
}

/** Calls `onFrame` with every frame for as long as the page is open, whatever becomes of server and engine.
 *  `onLost(message)` tells that there is none now; `onKey(message)` asks for a key and resolves when there is one. */
export async function watch({ onFrame, onLost, onKey }) {
  let pause = 0;
  for (;;) {
    const controller = new AbortController();
    let watchdog = setTimeout(() => controller.abort(), SILENCE);
    try {
      const response = await ask("v1/pool/stream", { signal: controller.signal });
      for await (const frame of events(response)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => controller.abort(), SILENCE);
        pause = 0;
        try {
          onFrame(frame);
        } catch (error) {
          reportError(error); // a fault of this page: the next frame may fare better
        }
      }
      onLost("the server ended the stream");
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) {
        await onKey(key.get() ? "The server refuses this key." : "This server asks for a key.");
        pause = 0;
        continue;
      }
      if (!(error instanceof Refusal || error instanceof Lost || error.name === "AbortError")) reportError(error);
      onLost(error instanceof Refusal ? error.message : "no answer from the server");
    } finally {
      clearTimeout(watchdog);
    }
    pause = Math.min(LONGEST_PAUSE, pause ? 2 * pause : 250);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
