"use strict";
// The arena over time. Data as page.py wrote them; a State is all cells of all groups at one frame.

const about = JSON.parse(document.getElementById("about").textContent);
const groups = about.groups;
const $ = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en");
const LABELS = 54; // pixels left of the picture
const MOVES = 44; // of the bars below it
const FOOT = 20; // of the labels below those
const MANY = 200; // moves: where there are more, only those of the moment get arrows

let frames, changes, jumps; // columns of numbers, see `read`
let shown = 0; // the frame of the strip
let axis = "step";
let marked = 0; // the owner whose pages are marked
let picked = null; // {group, cell} that the strip's keyboard is at
let colours = {};
let picture = null; // the arena over time, drawn once
let playing = 0;

class State {
  constructor() { this.reset(); }
  reset() {
    this.at = -1;
    this.cells = groups.map((g) => ({
      live: new Int32Array(g.cells), id: new Int32Array(g.cells), owner: new Int32Array(g.cells), since: new Int32Array(g.cells),
    }));
  }
  go(frame) {
    if (frame < this.at) this.reset();
    while (this.at < frame) {
      this.at += 1;
      groups.forEach((_, g) => {
        const cells = this.cells[g], slot = this.at * groups.length + g;
        for (let i = changes.start[slot]; i < changes.start[slot + 1]; i++) {
          const cell = changes.cell[i];
          cells.live[cell] = changes.live[i];
          cells.id[cell] = changes.id[i];
          cells.owner[cell] = changes.owner[i];
          cells.since[cell] = changes.since[i];
        }
      });
    }
    return this;
  }
}

const state = new State(); // of the strip
const probe = new State(); // of the pointer over the picture

async function read() {
  const packed = Uint8Array.from(atob($("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new Int32Array(await new Response(stream).arrayBuffer());
  let at = 0;
  const take = (n) => all.subarray(at, (at += n));
  const F = about.frames, G = groups.length;
  frames = { step: take(F), ms: take(F), record: take(F), refusals: take(F), groups: [] };
  for (let g = 0; g < G; g++) frames.groups.push({ lo: take(F), hi: take(F), live: take(F), moved: take(F) });
  const starts = (counts) => {
    const start = new Int32Array(counts.length + 1);
    counts.forEach((n, i) => { start[i + 1] = start[i] + n; });
    return start;
  };
  changes = { start: starts(take(F * G)) };
  const rows = changes.start[F * G];
  for (const name of ["cell", "live", "id", "owner", "since"]) changes[name] = take(rows);
  jumps = { start: starts(take(F)) };
  const moves = jumps.start[F];
  for (const name of ["group", "source", "destination", "pages"]) jumps[name] = take(moves);
}

// -- colours and shapes

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue("--" + name).trim();
  colours = { groups: groups.map((_, i) => value("group" + (i % 6))) };
  for (const name of ["page", "panel", "text", "quiet", "line", "free", "null", "hole", "move", "refusal"]) colours[name] = value(name);
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mix = (a, b, t) => a.map((v, i) => Math.round(v * t + b[i] * (1 - t)));

function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (height) canvas.style.height = height + "px";
  const pixels = [Math.round(width * scale), Math.round((height || canvas.clientHeight) * scale)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return { pen, width, height: height || canvas.clientHeight };
}

function bytes(n, like = n) {
  const [size, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]].find(([s]) => like >= s || s === 1);
  return (n / size).toFixed(1).replace(/\.0$/, "") + " " + unit;
}

// -- the arena over time

const span = () => Math.max(1, frames[axis][about.frames - 1] - frames[axis][0]);
const xOf = (frame, width) => LABELS + ((frames[axis][frame] - frames[axis][0]) / span()) * (width - LABELS - 1);

function frameAt(x, width) {
  const value = frames[axis][0] + ((x - LABELS) / Math.max(1, width - LABELS - 1)) * span();
  let lo = 0, hi = about.frames - 1;
  while (lo < hi) {
    const middle = (lo + hi + 1) >> 1;
    if (frames[axis][middle] <= value) lo = middle; else hi = middle - 1;
  }
  return lo;
}

function paintPicture(width, height) {
  const scale = window.devicePixelRatio || 1;
  const W = Math.max(1, Math.round((width - LABELS) * scale)), H = Math.max(1, Math.round(height * scale));
  const image = new ImageData(W, H), past = new State();
  const free = rgb(colours.free), none = rgb(colours.null), hole = rgb(colours.hole), own = colours.groups.map(rgb);
  const column = new Uint8ClampedArray(H * 3);
  const frameOf = Array.from({ length: W }, (_, x) => frameAt(LABELS + (x + 0.5) / scale, width));
  for (let x = 0; x < W; x++) {
    if (!x || frameOf[x] !== frameOf[x - 1]) {
      past.go(frameOf[x]);
      for (let y = 0; y < H; y++) {
        const at = Math.floor(((H - y - 0.5) / H) * about.arena);
        let colour = at < about.null ? none : free;
        for (let g = 0; g < groups.length; g++) {
          const page = Math.floor(at / groups[g].pageBytes), f = frames.groups[g];
          if (page >= f.lo[past.at] && page < f.hi[past.at]) {
            const live = past.cells[g].live[Math.floor(page / groups[g].perCell)];
            colour = live ? mix(own[g], hole, Math.min(1, live / groups[g].perCell)) : hole;
          }
        }
        column.set(colour, 3 * y);
      }
    }
    for (let y = 0; y < H; y++) {
      const to = 4 * (y * W + x);
      image.data[to] = column[3 * y];
      image.data[to + 1] = column[3 * y + 1];
      image.data[to + 2] = column[3 * y + 2];
      image.data[to + 3] = 255;
    }
  }
  const canvas = new OffscreenCanvas(W, H);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return { canvas, key: [W, H, axis].join() };
}

function drawTime() {
  const { pen, width, height } = sized($("time"));
  const map = height - MOVES - FOOT - 6, scale = window.devicePixelRatio || 1;
  const key = [Math.max(1, Math.round((width - LABELS) * scale)), Math.max(1, Math.round(map * scale)), axis].join();
  if (!picture || picture.key !== key) picture = paintPicture(width, map);
  pen.fillStyle = colours.page;
  pen.fillRect(0, 0, width, height);
  pen.drawImage(picture.canvas, LABELS, 0, width - LABELS, map);
  drawJumps(pen, width, map);
  drawMoved(pen, width, map + 6);
  pen.fillStyle = colours.quiet;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  for (let i = 0; i <= 4; i++) pen.fillText(bytes((about.arena * i) / 4, about.arena), LABELS - 6, Math.min(map - 2, Math.max(10, map - (map * i) / 4 + 4)));
  pen.fillText("moved", LABELS - 6, map + 6 + MOVES / 2);
  const ticks = width < 500 ? 2 : 4;
  for (let i = 0; i <= ticks; i++) {
    const value = frames[axis][0] + (span() * i) / ticks;
    pen.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
    const label = axis === "step" ? "step " + number(Math.round(value)) : (value / 1000).toFixed(1) + " s";
    pen.fillText(label, LABELS + ((width - LABELS) * i) / ticks, height - 5);
  }
  pen.fillStyle = colours.text;
  pen.fillRect(Math.round(xOf(shown, width)) - 1, 0, 2, height - FOOT + 4);
}

function drawJumps(pen, width, map) {
  pen.strokeStyle = pen.fillStyle = colours.move;
  pen.globalAlpha = 0.6;
  const all = jumps.group.length <= MANY;
  for (let f = all ? 0 : shown; f < (all ? about.frames : shown + 1); f++) {
    const x = xOf(f, width) + (all ? 0 : 6);
    for (let i = jumps.start[f]; i < jumps.start[f + 1]; i++) {
      const size = groups[jumps.group[i]].pageBytes, n = jumps.pages[i];
      const y = (page) => map * (1 - ((page + n / 2) * size) / about.arena);
      const from = y(jumps.source[i]), to = y(jumps.destination[i]), head = to < from ? 4 : -4;
      pen.beginPath();
      pen.moveTo(x, from);
      pen.lineTo(x, to);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x - 3, to + head);
      pen.lineTo(x + 3, to + head);
      pen.lineTo(x, to);
      pen.fill();
    }
  }
  pen.globalAlpha = 1;
}

function drawMoved(pen, width, top) {
  pen.fillStyle = colours.free;
  pen.fillRect(LABELS, top, width - LABELS, MOVES);
  const total = (f) => groups.reduce((sum, g, i) => sum + frames.groups[i].moved[f] * g.pageBytes, 0);
  let most = 1;
  for (let f = 0; f < about.frames; f++) most = Math.max(most, total(f));
  const bar = Math.max(2, Math.min(8, (width - LABELS) / about.frames));
  for (let f = 0; f < about.frames; f++) {
    let y = top + MOVES;
    groups.forEach((g, i) => {
      const tall = ((frames.groups[i].moved[f] * g.pageBytes) / most) * (MOVES - 8);
      pen.fillStyle = colours.groups[i];
      pen.fillRect(xOf(f, width) - bar / 2, y - tall, bar, tall);
      y -= tall;
    });
    pen.fillStyle = colours.refusal;
    if (frames.refusals[f]) pen.fillRect(xOf(f, width) - bar / 2, top, bar, 5);
  }
}

// -- the strip

let strip = null; // {width, rows, row}: how bytes lie on it

function layStrip(width) {
  const smallest = Math.min(...groups.map((g) => g.pageBytes * g.perCell));
  const wanted = Math.ceil((about.arena / smallest) * 5 / width);
  const rows = Math.max(2, Math.min(24, wanted));
  strip = { width, rows, row: rows > 12 ? 13 : rows > 5 ? 18 : 26, perRow: about.arena / rows };
}

function pieces(from, to) { // of the strip that these bytes cover: [x, y, width] each
  const found = [];
  for (let row = Math.floor(from / strip.perRow); row < strip.rows && row * strip.perRow < to; row++) {
    const a = Math.max(from, row * strip.perRow), b = Math.min(to, (row + 1) * strip.perRow);
    const x = ((a - row * strip.perRow) / strip.perRow) * strip.width;
    found.push([x, row * strip.row, ((b - a) / strip.perRow) * strip.width]);
  }
  return found;
}

function drawMap() {
  layStrip($("map").clientWidth);
  const { pen } = sized($("map"), strip.rows * strip.row);
  const fill = (from, to, colour, gap) => {
    pen.fillStyle = colour;
    for (const [x, y, w] of pieces(from, to)) pen.fillRect(x, y, Math.max(0.6, w - (w > 3 ? gap : 0)), strip.row - 3);
  };
  pen.fillStyle = colours.page;
  pen.fillRect(0, 0, strip.width, strip.rows * strip.row);
  fill(0, about.arena, colours.free, 0);
  fill(0, about.null, colours.null, 0);
  state.go(shown);
  const moved = new Set();
  for (let i = jumps.start[shown]; i < jumps.start[shown + 1]; i++)
    for (let p = 0; p < jumps.pages[i]; p++)
      moved.add(jumps.group[i] + ":" + Math.floor((jumps.destination[i] + p) / groups[jumps.group[i]].perCell));
  groups.forEach((g, i) => {
    const f = frames.groups[i], cells = state.cells[i], size = g.pageBytes * g.perCell;
    const own = rgb(colours.groups[i]), hole = rgb(colours.hole);
    for (let cell = Math.floor(f.lo[shown] / g.perCell); cell * g.perCell < f.hi[shown]; cell++) {
      const from = Math.max(cell * size, f.lo[shown] * g.pageBytes), to = Math.min((cell + 1) * size, f.hi[shown] * g.pageBytes);
      let colour = mix(own, hole, Math.min(1, cells.live[cell] / g.perCell));
      if (cells.live[cell] && cells.owner[cell] % 2) colour = mix(colour, rgb(colours.page), 0.8); // neighbours of two owners differ
      fill(from, to, `rgb(${colour})`, 1);
      const here = picked && picked.group === i && picked.cell === cell;
      if (here || moved.has(i + ":" + cell) || (marked && cells.live[cell] && cells.owner[cell] === marked)) {
        pen.strokeStyle = pen.fillStyle = colours.text;
        pen.lineWidth = here ? 2.5 : 1.5;
        for (const [x, y, w] of pieces(from, to)) {
          if (here || marked) pen.strokeRect(x + 0.75, y + 0.75, Math.max(1, w - 2.5), strip.row - 4.5);
          if (moved.has(i + ":" + cell)) pen.fillRect(x + w / 2 - 1.5, y + strip.row / 2 - 3, 3, 3);
        }
      }
    }
  });
}

function when(step) {
  if (step <= frames.step[0]) return "the start of the journal or before";
  let f = 0;
  while (f < about.frames - 1 && frames.step[f] < step) f += 1;
  return `step ${number(step)} (about ${(frames.ms[f] / 1000).toFixed(2)} s)`;
}

function byteText(at, from) { // what lies at a byte, in words
  for (let i = 0; i < groups.length; i++) {
    const g = groups[i], f = frames.groups[i], page = Math.floor(at / g.pageBytes);
    if (page < f.lo[from.at] || page >= f.hi[from.at]) continue;
    const cell = Math.floor(page / g.perCell), cells = from.cells[i];
    const place = g.perCell === 1 ? `${g.name} page ${number(page)}`
      : `${g.name} pages ${number(cell * g.perCell)} to ${number(Math.min(g.pages, (cell + 1) * g.perCell) - 1)}, ${cells.live[cell]} live`;
    if (!cells.live[cell]) return { text: `${place}: a hole`, group: i, cell, owner: 0 };
    const owner = cells.owner[cell], name = about.names[owner];
    const whose = name === undefined ? "owner not known" : `request ${name}`;
    const first = g.perCell === 1 ? "" : "the first: ";
    return { text: `${place}: ${first}id ${number(cells.id[cell])}, ${whose}, since ${when(cells.since[cell])}`, group: i, cell, owner };
  }
  return { text: at < about.null ? "null pages" : `byte ${number(Math.floor(at))}: free, open to every group`, owner: 0 };
}

function byteUnder(event) {
  const box = $("map").getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top) / strip.row);
  const x = Math.min(box.width - 1, Math.max(0, event.clientX - box.left));
  return Math.min(about.arena - 1, (row + x / box.width) * strip.perRow);
}

// -- what is said

function tell(found) { $("what").textContent = found ? found.text : "Point at a page, or go to the strip and use the arrow keys."; }

function show(frame, said) {
  shown = Math.max(0, Math.min(about.frames - 1, frame));
  $("moment").value = shown;
  $("moment").setAttribute("aria-valuetext", `step ${frames.step[shown]}`);
  const refused = frames.refusals[shown];
  $("now").textContent = `Step ${number(frames.step[shown])}, ${(frames.ms[shown] / 1000).toFixed(2)} s, record ${number(frames.record[shown])}`
    + (refused ? `, ${number(refused)} refused` : "");
  drawTime();
  drawMap();
  $("groups").replaceChildren(...groups.map((g, i) => {
    const f = frames.groups[i], row = document.createElement("tr");
    const pages = f.live[shown], holes = f.hi[shown] - f.lo[shown] - pages;
    for (const text of [g.name, number(pages * g.pageBytes), number(holes), number(pages), number(f.lo[shown] * g.pageBytes),
      number(f.hi[shown] * g.pageBytes), bytes(f.moved[shown] * g.pageBytes)]) {
      row.append(Object.assign(document.createElement("td"), { textContent: text }));
    }
    return row;
  }));
  if (picked && !said) tell(byteText((picked.cell * groups[picked.group].perCell + 0.5) * groups[picked.group].pageBytes, state));
}

function order() { // cells of the moment in byte order
  const found = [];
  groups.forEach((g, i) => {
    const f = frames.groups[i];
    for (let cell = Math.floor(f.lo[shown] / g.perCell); cell * g.perCell < f.hi[shown]; cell++)
      found.push({ group: i, cell, at: Math.max(cell * g.perCell, f.lo[shown]) * g.pageBytes });
  });
  return found.sort((a, b) => a.at - b.at);
}

function pick(step) {
  const all = order();
  if (!all.length) return;
  let at = picked ? all.findIndex((c) => c.group === picked.group && c.cell === picked.cell) : -1;
  if (at < 0) at = step > 0 ? -1 : all.length;
  if (Math.abs(step) > 1) { // a row up or down
    const target = (all[Math.max(0, at)] || all[0]).at + Math.sign(step) * strip.perRow;
    at = all.reduce((best, c, i) => (Math.abs(c.at - target) < Math.abs(all[best].at - target) ? i : best), 0);
  } else at = Math.max(0, Math.min(all.length - 1, at + step));
  picked = all[at];
  tell(byteText(picked.at + groups[picked.group].pageBytes / 2, state));
  drawMap();
}

function play() {
  const on = !playing;
  $("play").textContent = on ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(on));
  clearInterval(playing);
  if (shown === about.frames - 1) show(0);
  playing = on ? setInterval(() => (shown < about.frames - 1 ? show(shown + 1) : play()), 80) : 0;
}

function keys(event) {
  const far = event.shiftKey ? 10 : 1;
  const to = { ArrowLeft: shown - far, ArrowRight: shown + far, PageUp: shown - 10, PageDown: shown + 10, Home: 0, End: about.frames - 1 }[event.key];
  if (to !== undefined) show(to);
  else if (event.key === "p" || event.key === "P") play();
  else return;
  event.preventDefault();
}

function mapKeys(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -2, ArrowDown: 2 }[event.key];
  if (step) pick(step);
  else if (event.key === "Enter" && picked) mark(byteText((picked.cell * groups[picked.group].perCell + 0.5) * groups[picked.group].pageBytes, state).owner);
  else if (event.key === "Escape") { picked = null; mark(0); tell(null); }
  else return;
  event.preventDefault();
}

function mark(owner) { marked = marked === owner ? 0 : owner; drawMap(); }

function scrub(event) {
  const box = $("time").getBoundingClientRect(), x = event.clientX - box.left, map = box.height - MOVES - FOOT - 6;
  const frame = frameAt(x, box.width);
  if (event.buttons & 1) show(frame, true);
  const at = (1 - (event.clientY - box.top) / map) * about.arena;
  if (at >= 0 && x > LABELS) tell({ text: `Step ${number(frames.step[frame])}: ${byteText(Math.min(at, about.arena - 1), probe.go(frame)).text}` });
}

function redraw() { readColours(); picture = null; show(shown, true); }

read().then(() => {
  const legend = [...groups.map((g, i) => [g.name, `--group${i % 6}`]), ["hole", "--hole"], ["free", "--free"], ["null", "--null"], ["moved", "--move"], ["refused", "--refusal"]];
  $("legend").replaceChildren(...legend.map(([name, colour]) => {
    const item = Object.assign(document.createElement("li"), { textContent: name });
    item.style.setProperty("--swatch", `var(${colour})`);
    return item;
  }));
  const coarse = groups.filter((g) => g.perCell > 1).map((g) => `${g.perCell} pages of ${g.name}`);
  const every = about.frames > 2 ? Math.round((frames.step[about.frames - 1] - frames.step[0]) / (about.frames - 1)) : 1;
  $("notes").textContent = [
    every > 1 ? `One frame is about ${every} steps: what changed and changed back between is not shown.` : "One frame is one step.",
    coarse.length ? `One cell is ${coarse.join(", ")}.` : "",
    about.namesLeftOut ? `${number(about.namesLeftOut)} owners' names are left out.` : "",
  ].join(" ");
  $("moment").max = about.frames - 1;
  $("moment").addEventListener("input", () => show(Number($("moment").value)));
  $("play").addEventListener("click", play);
  $("time").addEventListener("keydown", keys);
  $("map").addEventListener("keydown", mapKeys);
  $("time").addEventListener("pointerdown", (event) => { $("time").setPointerCapture(event.pointerId); scrub(event); });
  $("time").addEventListener("pointermove", scrub);
  $("map").addEventListener("pointermove", (event) => tell(byteText(byteUnder(event), state)));
  $("map").addEventListener("click", (event) => mark(byteText(byteUnder(event), state).owner));
  for (const radio of document.querySelectorAll("[name=axis]")) radio.addEventListener("change", () => { axis = radio.value; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(document.body);
  readColours();
  tell(null);
  show(Math.floor(about.frames / 2));
  document.documentElement.dataset.ready = "yes";
});
