// The completion and chat box: streams an answer, can stop it, and shows what it cost.

import { bytes, count, element, seconds } from "./format.js";
import { restorable, waited } from "./requests.js";
import { ask, events, Lost, Refusal } from "./stream.js";

export class AskBox {
  #log;
  #form;
  #buttons;
  #modes;
  #model = null;
  #messages = []; // of the chat so far
  #running = null; // aborts the request that is being answered

  constructor(root) {
    const find = (id) => root.querySelector(`#${id}`);
    this.#log = find("log");
    this.#form = find("form");
    this.#modes = find("modes");
    this.#buttons = { send: find("send"), stop: find("stop") };
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#form.elements.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    this.#buttons.stop.addEventListener("click", () => this.#running?.abort());
    find("clear").addEventListener("click", () => this.#clear());
  }

  /** What is served, so that a model with a chat template gets chats. */
  serve(model) {
    if (!model || model.id === this.#model?.id) return;
    this.#model = model;
    this.#modes.hidden = !model.chat;
    this.#form.elements["max-tokens"].max = model.max_model_len;
  }

  get #isChat() {
    return Boolean(this.#model?.chat) && this.#form.elements.mode.value === "chat";
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#log.replaceChildren();
  }

  async #send() {
    const text = this.#form.elements.prompt.value;
    if (!text || this.#running) return;
    this.#running = new AbortController();
    this.#busy(true);
    const chat = this.#isChat;
    const answer = this.#begin(text, chat);
    if (chat) this.#form.elements.prompt.value = "";
    try {
      await this.#stream(answer, this.#body(text, chat), chat);
      if (chat) this.#messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text.textContent });
    } catch (error) {
      if (error.name === "AbortError") answer.note("stopped");
      else if (error instanceof Refusal) answer.note(error.message, "bad");
      else if (error instanceof Lost) answer.note("the connection broke", "bad");
      else throw error;
    } finally {
      this.#running = null;
      this.#busy(false);
    }
  }

  #body(text, chat) {
    const { elements } = this.#form;
    const prompt = chat ? { messages: [...this.#messages, { role: "user", content: text }] } : { prompt: text };
    return {
      ...prompt,
      max_tokens: Number(elements["max-tokens"].value),
      temperature: Number(elements.temperature.value),
      stream: true,
      stream_options: { include_usage: true },
      isthmus: { receipt: true },
    };
  }

  async #stream(answer, body, chat) {
    const start = performance.now();
    let first = null;
    const response = await ask(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: this.#running.signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Refusal(503, event.error.message);
      for (const choice of event.choices) {
        const more = chat ? (choice.delta.content ?? "") : choice.text;
        if (more) first ??= performance.now();
        this.#append(answer, more);
      }
      if (event.usage) answer.cost(event.usage, event.isthmus?.receipt, ((first ?? performance.now()) - start) / 1000, (performance.now() - start) / 1000);
    }
  }

  /** A question and the place for its answer. */
  #begin(question, chat) {
    const entry = element("article", "", { className: chat ? "entry chat" : "entry" });
    const text = element("span", "", { className: "answer" });
    const notes = element("p", "", { className: "notes" });
    const body = element("p", "", { className: "text" });
    body.append(element("span", question, { className: "question" }), text);
    entry.append(body, notes);
    this.#log.append(entry);
    this.#log.scrollTop = this.#log.scrollHeight;
    return {
      text,
      note: (words, kind = "") => notes.append(element("span", words, { className: kind })),
      cost: (usage, receipt, first, all) => {
        notes.append(...cost(usage, receipt, first, all).map((words) => element("span", words)));
        this.#log.scrollTop = this.#log.scrollHeight;
      },
    };
  }

  /** Follows the text, unless the reader has scrolled back. */
  #append(answer, more) {
    const log = this.#log;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    answer.text.append(more);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  #busy(is) {
    this.#buttons.send.disabled = is;
    this.#buttons.stop.disabled = !is;
    this.#log.setAttribute("aria-busy", is);
    if (is) this.#buttons.stop.focus({ preventScroll: true });
    else if (document.activeElement === document.body || document.activeElement === this.#buttons.stop) {
      this.#form.elements.prompt.focus({ preventScroll: true });
    }
  }
}

/** Usage and receipt in words. */
function cost(usage, receipt, first, all) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = usage.completion_tokens > 1 && all > first ? `, ${((usage.completion_tokens - 1) / (all - first)).toFixed(1)} a second` : "";
  const found = [
    `prompt ${count(usage.prompt_tokens)} tokens, ${count(cached)} of them cached`,
    `output ${count(usage.completion_tokens)} tokens${speed}`,
    `first after ${seconds(first)}`,
  ];
  if (!receipt) return found;
  const pages = Object.entries(receipt.pages).map(([name, n]) => `${name} ${count(n)}`);
  found.push(`fresh pages: ${pages.join(", ")} (${bytes(receipt.bytes)})`, `restorable: ${restorable(receipt)}`);
  if (receipt.cut_by) found.push(`hit cut by ${receipt.cut_by}`);
  if (receipt.waited_seconds >= 0.001) found.push(`waited ${waited(receipt)}`);
  if (receipt.preemptions) found.push(`preempted ${count(receipt.preemptions)} ×`);
  return found;
}
