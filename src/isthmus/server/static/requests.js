// Who is being served, and what it cost those who were: ids and counts.

import { bytes, count, element, seconds } from "./format.js";

const MOST_SERVED = 24;
const MOST_ENDED = 8;
const REASONS = {
  rows: "a free row",
  budget: "the step's budget",
  memory: "memory",
  prefix: "a sibling's prompt",
  queue: "its turn",
};

export function showRequests(running, ended, frame) {
  const first = frame.served.slice(0, MOST_SERVED);
  const served = first.map((request) => cells(servedRow(request), request.state));
  const more = frame.left_out + frame.served.length - first.length;
  if (more) served.push(note(`and ${count(more)} more`, 9));
  fill(running, served, "Nothing runs.", 9);
  fill(ended, frame.ended.toReversed().slice(0, MOST_ENDED).map((request) => cells(endedRow(request))), "Nothing has ended yet.", 8);
}

function servedRow(request) {
  const longest = request.prompt_tokens + request.output_tokens;
  return [
    ["request", short(request.request_id, request.index), request.request_id],
    ["state", request.state + (request.preemptions ? `, preempted ${request.preemptions} ×` : "")],
    ["prompt", count(request.prompt_tokens)],
    ["cached", count(request.cached_tokens)],
    ["through", `${count(request.done_tokens)} of ${count(longest)}`],
    ["output", `${count(request.output_tokens)} of ${count(request.limit)}`],
    ["waited", waited(request)],
    ["restorable", restorable(request)],
    ["cut by", request.cut_by ?? "–"],
  ];
}

function endedRow(receipt) {
  const pages = Object.entries(receipt.pages).map(([name, n]) => `${name} ${count(n)}`);
  return [
    ["request", short(receipt.request_id, 0), receipt.request_id],
    ["prompt", count(receipt.prompt_tokens)],
    ["cached", count(receipt.cached_tokens)],
    ["output", count(receipt.output_tokens)],
    ["waited", waited(receipt)],
    ["pages", `${pages.join(", ")} (${bytes(receipt.bytes)})`],
    ["restorable", restorable(receipt)],
    ["cut by", receipt.cut_by ?? "–"],
  ];
}

export function waited({ waited_seconds, waited_for }) {
  const longest = Object.entries(waited_for).sort((a, b) => b[1] - a[1]).map(([reason]) => REASONS[reason] ?? reason);
  return waited_seconds < 0.001 ? "–" : `${seconds(waited_seconds)} for ${longest.join(", ")}`;
}

/** What each kind could have restored of what the prefix cache knows. */
export function restorable({ known_tokens, restorable: groups }) {
  if (!known_tokens) return "nothing known";
  const parts = Object.entries(groups).map(([name, tokens]) => `${name} ${count(tokens)}`);
  return `${parts.join(", ")} of ${count(known_tokens)}`;
}

/** The end of an id, which is random, and which of its continuations this is. */
function short(id, index) {
  const [, name, prompt] = /([0-9a-z]{6})(-\d+)$/i.exec(id) ?? ["", id, ""];
  return `${name}${prompt}${index ? `/${index}` : ""}`;
}

function cells(values, state) {
  const row = element("tr", "", state ? { dataset: { state } } : {});
  values.forEach(([label, text, title], i) => {
    const options = { dataset: { label }, ...(title ? { title } : {}) };
    row.append(element(i ? "td" : "th", text, i ? options : { ...options, scope: "row" }));
  });
  return row;
}

const note = (text, columns) => {
  const row = element("tr", "", { className: "note" });
  row.append(element("td", text, { colSpan: columns }));
  return row;
};

function fill(table, rows, empty, columns) {
  table.tBodies[0].replaceChildren(...(rows.length ? rows : [note(empty, columns)]));
}
