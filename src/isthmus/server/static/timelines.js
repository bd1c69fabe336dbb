// Six charts of the last minutes, drawn by uPlot.

import { bytes, count, element, percent, rate } from "./format.js";
import { SPAN } from "./history.js";
import { color, groupColor, onTheme, stripes } from "./theme.js";

const HEIGHT = 150;
const LEAST_SPAN = 60; // seconds
const WHOLE = Array.from({ length: 27 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
const POWERS = Array.from({ length: 40 }, (_, i) => 1024 * 2 ** i);
const CHARTS = [
  { title: "Running and waiting", lines: [["running", "group-0"], ["waiting", "group-1"]], text: count, steps: WHOLE },
  { title: "Tokens a second", least: 10, lines: [["generated", "group-0", "generatedRate"], ["prompt", "group-1", "promptRate"]], text: rate },
  { title: "Prefix hits, of the last 30 s", lines: [["prompt tokens cached", "group-2", "hitRate"]], text: percent, top: 1 },
  { title: "Bytes moved a second", least: 4096, lines: [["moved", "group-3", "movedRate"]], text: bytes, steps: POWERS },
  {
    title: "Preempted and refused, since this page opened",
    lines: [["preempted", "group-1", "preemptions"], ["plans refused", "group-3", "refusals"], ["requests refused", "group-4", "turnedAway"]],
    text: count, steps: WHOLE, wide: true,
  },
];

export class Timelines {
  #place;
  #charts = [];
  #groups = null; // names, for which the charts were made
  #points = [];

  constructor(place) {
    this.#place = place;
    onTheme(() => {
      this.#groups = null;
      this.show(this.#points);
    });
    new ResizeObserver(() => this.#resize()).observe(place);
  }

  show(points) {
    this.#points = points;
    const newest = points.findLast(({ pool }) => pool);
    if (!newest) return;
    const groups = newest.pool.groups.map(({ name }) => name).join();
    if (groups !== this.#groups) this.#build(newest.pool);
    this.#groups = groups;
    for (const chart of this.#charts) chart.show(points);
  }

  #build(pool) {
    for (const chart of this.#charts) chart.plot.destroy();
    this.#place.replaceChildren();
    const lines = CHARTS.map((chart) => ({
      ...chart,
      lines: chart.lines.map(([label, ink, field = label]) => ({
        label, stroke: color(ink), swatch: ink, value: (point) => point[field],
      })),
    }));
    this.#charts = [arena(pool), ...lines].map((chart) => new Chart(this.#place, chart));
  }

  #resize() {
    for (const chart of this.#charts) chart.fit();
  }
}

/** The stacked chart: each group's states and what is nobody's, up to the arena's size. */
function arena(pool) {
  const surface = color("surface");
  const lines = pool.groups.flatMap(({ name }, index) => {
    const ink = color(groupColor(index));
    const of = (state) => (point) => point.pool?.groups[index]?.bytes[state] ?? null;
    const line = (state, fill) => ({ label: `${name} ${state}`, stroke: ink, fill, value: of(state), state, swatch: groupColor(index) });
    return [line("live", ink), line("cached", stripes(ink, surface)), line("hole", surface)];
  });
  return { title: "The arena", lines, stacked: true, top: pool.arena_bytes, text: bytes, wide: true };
}

function ago(seconds) {
  if (!seconds) return "now";
  return seconds > -100 ? `${Math.round(seconds)} s` : `${(seconds / 60).toFixed(1)} min`;
}

class Chart {
  #chart;
  #host;
  #values; // of the legend
  #data = [];
  #span = LEAST_SPAN;
  #levels = []; // values as the legend tells them: a stacked chart draws sums

  constructor(place, chart) {
    this.#chart = chart;
    const figure = element("figure", "", { className: chart.wide ? "chart wide" : "chart" });
    figure.append(element("figcaption", chart.title));
    const legend = element("ul", "", { className: "legend" });
    this.#values = chart.lines.map(({ label, swatch, state = "live" }) => {
      const value = element("b");
      const item = element("li", `${label} `);
      item.prepend(element("span", "", { className: `swatch ${state}`, dataset: { color: swatch } }));
      item.append(value);
      legend.append(item);
      return value;
    });
    this.#host = element("div", "", { className: "plot" });
    figure.append(legend, this.#host);
    place.append(figure);
    this.plot = new uPlot(this.#options(), [[], ...chart.lines.map(() => [])], this.#host);
  }

  show(points) {
    const { lines, stacked } = this.#chart;
    const now = points.at(-1)?.time ?? 0;
    this.#span = Math.min(SPAN, Math.max(LEAST_SPAN, now - (points[0]?.time ?? now)));
    this.#levels = lines.map(({ value }) => points.map(value));
    const below = points.map(() => 0);
    const drawn = this.#levels.map((level) =>
      stacked ? level.map((value, i) => (value === null ? null : (below[i] += value))) : level,
    );
    this.#data = [points.map(({ time }) => time - now), ...drawn];
    this.plot.setData(this.#data, true);
    this.#tell();
  }

  fit() {
    const width = this.#host.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  #options() {
    const { lines, stacked, top, text, steps, least = 4 } = this.#chart;
    const ink = color("muted");
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: color("line"), width: 1 }, ticks: { show: false } };
    const series = lines.map(({ stroke, fill }, i) => ({ stroke, width: stacked ? 1 : 1.75, points: { show: false }, fill: i ? undefined : fill }));
    return {
      width: this.#host.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { setScale: false } },
      hooks: { setCursor: [() => this.#tell()] },
      scales: {
        x: { time: false, range: () => [-this.#span, 0] },
        y: { range: (_, low, high) => [0, top ?? Math.max(least, 1.15 * (high ?? 0))] },
      },
      axes: [
        { ...axis, size: 24, values: (_, ticks) => ticks.map(ago), splits: () => [-1, -0.75, -0.5, -0.25, 0].map((share) => share * this.#span) },
        {
          ...axis, size: 62, values: (_, ticks) => ticks.map(text),
          ...(top ? { splits: () => [0, 0.25, 0.5, 0.75, 1].map((share) => share * top) } : {}),
          ...(steps ? { incrs: steps } : {}),
        },
      ],
      series: [{}, ...series],
      bands: stacked ? lines.map(({ fill }, i) => ({ series: [i + 1, i], fill, dir: -1 })).slice(1) : undefined,
    };
  }

  /** The values under the cursor, or the newest. */
  #tell() {
    const index = this.plot?.cursor.idx ?? this.#data[0]?.length - 1;
    this.#levels.forEach((level, i) => {
      const value = level[index];
      this.#values[i].textContent = value === null || value === undefined ? "–" : this.#chart.text(value);
    });
  }
}
