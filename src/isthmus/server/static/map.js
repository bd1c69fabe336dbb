// The arena on a canvas: a strip of all of it with the frontiers, and below it the same bytes in rows, page by page.

import { describe, partsOf, summary } from "./parts.js";
import { color, groupColor, onTheme, stripes } from "./theme.js";

const STRIP = 30; // pixels, as all lengths here
const TICKS = 9;
const ROW = 11;
const ROW_GAP = 2;
const NARROW = 560;

export class ArenaMap {
  #canvas;
  #readout;
  #frame = null;
  #parts = [];
  #paints = null;
  #chosen = { part: 0, run: -1 }; // by keyboard; a run of -1 is the whole part
  #pointed = null; // by the pointer, while it is over the map

  constructor(canvas, readout) {
    this.#canvas = canvas;
    this.#readout = readout;
    onTheme(() => {
      this.#paints = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    for (const change of ["focus", "blur"]) canvas.addEventListener(change, () => this.draw());
    canvas.addEventListener("pointerleave", () => {
      this.#pointed = null;
      this.draw();
    });
  }

  show(frame) {
    this.#frame = frame;
    this.#parts = partsOf(frame);
    this.draw();
  }

  get #total() {
    return this.#frame.pool.arena_bytes;
  }

  get #rows() {
    return this.#canvas.clientWidth < NARROW ? 20 : 14;
  }

  draw() {
    if (!this.#frame || !this.#canvas.clientWidth) return;
    const canvas = this.#canvas;
    const [width, height] = [canvas.clientWidth, STRIP + TICKS + this.#rows * (ROW + ROW_GAP)];
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    this.#paints ??= this.#mix();
    this.#drawStrip(pen, width);
    this.#drawRows(pen, width);
    this.#drawChosen(pen, width);
    this.#tell();
  }

  // -- painting -----------------------------------------------------------------------------------------------

  #mix() {
    const surface = color("surface");
    const named = { gap: color("gap"), null: color("null"), tail: stripes(color("null"), surface), text: color("text"), accent: color("accent") };
    const groups = this.#frame.pool.groups.map((_, index) => {
      const ink = color(groupColor(index));
      return { ink, cached: stripes(ink, surface), hole: surface };
    });
    return { ...named, surface, on: color("on-group"), groups };
  }

  #drawStrip(pen, width) {
    const x = (byte) => (byte / this.#total) * width;
    for (const part of this.#parts) {
      this.#fill(pen, part, x(part.lo), 0, x(part.hi) - x(part.lo), STRIP);
    }
    pen.fillStyle = this.#paints.text;
    pen.font = "600 12px system-ui, sans-serif";
    for (const part of this.#parts.filter(({ kind }) => kind === "region")) {
      for (const edge of [part.lo, part.hi]) this.#tick(pen, x(edge));
      this.#label(pen, part, x(part.lo), x(part.hi), width);
    }
  }

  /** A frontier: a line through the strip and a notch below it. */
  #tick(pen, at) {
    const left = Math.min(this.#canvas.clientWidth - 1, Math.max(0, at - 0.5));
    pen.fillStyle = this.#paints.text;
    pen.fillRect(left, 0, 1, STRIP + 3);
    pen.beginPath();
    pen.moveTo(left + 0.5, STRIP + 1);
    pen.lineTo(left - 3.5, STRIP + 6);
    pen.lineTo(left + 4.5, STRIP + 6);
    pen.fill();
  }

  /** The region's name on it, or beside it where it is too small. */
  #label(pen, part, lo, hi, width) {
    const room = pen.measureText(part.name).width + 12;
    const inside = hi - lo >= room;
    const left = inside ? (lo + hi - room) / 2 : hi + room <= width ? hi + 2 : Math.max(0, lo - room - 2);
    pen.globalAlpha = 0.86;
    pen.fillStyle = this.#paints.surface;
    pen.beginPath();
    pen.roundRect(left, 6, room, STRIP - 12, 4);
    pen.fill();
    pen.globalAlpha = 1;
    pen.fillStyle = this.#paints.text;
    pen.textBaseline = "middle";
    pen.fillText(part.name, left + 6, STRIP / 2 + 0.5);
  }

  #drawRows(pen, width) {
    for (const part of this.#parts) {
      if (part.kind !== "region") {
        this.#eachRow(part, width, (x, y, w) => this.#fill(pen, part, x, y, w, ROW));
        continue;
      }
      for (const run of part.runs) {
        this.#eachRow(run, width, (x, y, w) => this.#fillRun(pen, part, run, x, y, w, ROW));
      }
    }
  }

  /** Rectangles `(x, y, width)` of an interval in the rows. */
  #eachRow({ lo, hi }, width, paint) {
    const perRow = this.#total / this.#rows;
    for (let row = Math.floor(lo / perRow); row * perRow < hi && row < this.#rows; row += 1) {
      const from = Math.max(0, lo - row * perRow) / perRow;
      const to = Math.min(perRow, hi - row * perRow) / perRow;
      paint(from * width, STRIP + TICKS + row * (ROW + ROW_GAP), (to - from) * width);
    }
  }

  #fill(pen, part, x, y, w, h) {
    if (part.kind !== "region") {
      pen.fillStyle = this.#paints[part.kind];
      pen.fillRect(x, y, w, h);
      return;
    }
    const { live, cached, hole } = part.group.pages;
    this.#fillRun(pen, part, { first: 0, end: live + cached + hole, live, cached }, x, y, w, h);
  }

  /** Holes as the outline alone, cached pages striped, live ones solid, from top to bottom by their share. */
  #fillRun(pen, part, run, x, y, w, h) {
    const paint = this.#paints.groups[part.index];
    const pages = run.end - run.first;
    const live = (h * run.live) / pages;
    const cached = (h * run.cached) / pages;
    pen.fillStyle = paint.hole;
    pen.fillRect(x, y, w, h);
    pen.globalAlpha = 0.3;
    pen.fillStyle = paint.ink;
    pen.fillRect(x, y, w, 1);
    pen.fillRect(x, y + h - 1, w, 1);
    pen.globalAlpha = 1;
    pen.fillStyle = paint.cached;
    pen.fillRect(x, y + h - live - cached, w, cached);
    pen.fillStyle = paint.ink;
    pen.fillRect(x, y + h - live, w, live);
  }

  #drawChosen(pen, width) {
    if (!this.#isChoosing) return;
    const { part, run } = this.#current;
    const interval = run ?? part;
    pen.strokeStyle = this.#paints.accent;
    pen.lineWidth = 2;
    const x = (byte) => (byte / this.#total) * width;
    pen.strokeRect(x(interval.lo) + 1, 1, Math.max(2, x(interval.hi) - x(interval.lo) - 2), STRIP - 2);
    this.#eachRow(interval, width, (left, y, w) => pen.strokeRect(left, y - 0.5, Math.max(2, w), ROW + 1));
  }

  // -- choosing -----------------------------------------------------------------------------------------------

  get #current() {
    if (this.#pointed) {
      const byte = this.#pointed;
      const part = this.#parts.find(({ lo, hi }) => lo <= byte && byte < hi) ?? this.#parts.at(-1);
      return { part, run: part.runs?.find(({ lo, hi }) => lo <= byte && byte < hi) };
    }
    const part = this.#parts[Math.min(this.#chosen.part, this.#parts.length - 1)];
    return { part, run: part.runs?.[Math.min(this.#chosen.run, part.runs.length - 1)] };
  }

  get #isChoosing() {
    return Boolean(this.#pointed) || document.activeElement === this.#canvas;
  }

  #tell() {
    const { part, run } = this.#current;
    const text = describe(part, run);
    const interval = run ?? part;
    this.#readout.textContent = this.#isChoosing ? text : summary(this.#frame.pool);
    Object.assign(this.#readout.dataset, { kind: part.kind, bytes: interval.hi - interval.lo });
    this.#canvas.setAttribute("aria-valuemax", this.#total);
    this.#canvas.setAttribute("aria-valuenow", interval.lo);
    this.#canvas.setAttribute("aria-valuetext", text);
  }

  #key(event) {
    if (!this.#frame || event.ctrlKey || event.altKey || event.metaKey) return;
    const last = this.#parts.length - 1;
    const chosen = this.#chosen;
    chosen.part = Math.min(chosen.part, last);
    const runs = this.#parts[chosen.part].runs?.length ?? 0;
    const steps = {
      ArrowRight: () => ({ part: Math.min(last, chosen.part + 1), run: -1 }),
      ArrowLeft: () => ({ part: Math.max(0, chosen.part - 1), run: -1 }),
      ArrowDown: () => ({ part: chosen.part, run: Math.min(runs - 1, chosen.run + 1) }),
      ArrowUp: () => ({ part: chosen.part, run: Math.max(-1, Math.min(runs, chosen.run) - 1) }),
      Home: () => ({ part: 0, run: -1 }),
      End: () => ({ part: last, run: -1 }),
    };
    if (!steps[event.key]) return;
    event.preventDefault();
    this.#pointed = null;
    this.#chosen = steps[event.key]();
    this.draw();
  }

  #point(event) {
    if (!this.#frame) return;
    const box = this.#canvas.getBoundingClientRect();
    const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const y = event.clientY - box.top - STRIP - TICKS;
    const row = Math.min(this.#rows - 1, Math.floor(y / (ROW + ROW_GAP)));
    const share = y < 0 ? x : (row + x) / this.#rows;
    this.#pointed = Math.min(this.#total - 1, share * this.#total) || 1;
    this.draw();
  }
}
