// The dashboard: frames come in from the stream, and every part of the page shows its share.

import { AskBox } from "./ask.js";
import { showFigures, showTiles } from "./figures.js";
import { History } from "./history.js";
import { ArenaMap } from "./map.js";
import { showRequests } from "./requests.js";
import { key, watch } from "./stream.js";
import { start as startTheme } from "./theme.js";
import { Timelines } from "./timelines.js";

const STATES = {
  ready: "serving",
  starting: "engine starting",
  restarting: "engine restarting",
  draining: "shutting down",
  stopped: "stopped",
};

const find = (id) => document.getElementById(id);
const history = new History();
const map = new ArenaMap(find("map"), find("readout"));
const timelines = new Timelines(find("timelines"));
const askBox = new AskBox(find("ask"));
let newest = null; // the newest frame with an arena
let shown = ""; // what the tables of requests were made from
let paused = false;

startTheme(find("theme"));
find("pause").addEventListener("click", () => {
  paused = !paused;
  find("pause").setAttribute("aria-pressed", paused);
  find("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) show();
});
find("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});

function tellState(state, text) {
  const pill = find("state");
  if (pill.textContent !== text) pill.textContent = text; // said aloud only when it changes
  pill.dataset.state = state;
  document.body.classList.toggle("stale", state !== "ready" && state !== "draining");
}

function take(frame) {
  find("forget").hidden = !key.get();
  tellState(frame.state, STATES[frame.state] ?? frame.state);
  find("model").textContent = frame.model?.id ?? "";
  document.title = frame.model ? `${frame.model.id} · Isthmus` : "Isthmus";
  askBox.serve(frame.model);
  history.add(frame);
  if (frame.pool) newest = frame;
  if (!paused) show();
}

function show() {
  timelines.show(history.points);
  if (!newest) return;
  map.show(newest);
  showTiles(find("tiles"), newest, history.newest);
  showFigures(find("figures"), newest);
  const requests = JSON.stringify([newest.served, newest.left_out, newest.ended]);
  if (requests !== shown) showRequests(find("served"), find("ended"), newest);
  shown = requests;
}

/** Resolves once there is a key. */
function askForKey(reason) {
  tellState("locked", "key needed");
  const dialog = find("key-dialog");
  find("key-reason").textContent = reason;
  find("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    find("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        key.set(find("key").value.trim());
        dialog.close();
        resolve();
      },
      { once: true },
    );
  });
}

const lost = (message) => tellState("lost", `${message}: trying again`);

watch({ onFrame: take, onLost: lost, onKey: askForKey });
