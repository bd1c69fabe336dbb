// The arena as intervals of bytes, low to high, that leave nothing out: their sizes sum to it.

import { bytes, count, percent } from "./format.js";

/** null, regions, the gaps between them, tail: `{kind, lo, hi, name?, group?, index?, runs?}`. */
export function partsOf({ pool, regions }) {
  const found = [];
  let edge = 0;
  const add = (part) => {
    if (part.hi > part.lo) found.push(part);
    edge = Math.max(edge, part.hi);
  };
  add({ kind: "null", lo: 0, hi: pool.null_bytes });
  pool.groups.forEach((group, index) => {
    const [lo, hi] = group.frontiers;
    if (hi === lo) return; // an empty region is nowhere
    add({ kind: "gap", lo: edge, hi: lo });
    const region = regions.find(({ name }) => name === group.name);
    add({ kind: "region", name: group.name, lo, hi, group, index, runs: runsOf(region, group.page_bytes) });
  });
  const top = pool.arena_bytes - pool.tail_bytes;
  add({ kind: "gap", lo: edge, hi: top });
  add({ kind: "tail", lo: top, hi: pool.arena_bytes });
  return found;
}

/** Runs of equal cells of a region: bytes, pages, and how many of those are live and cached. */
function runsOf({ lo, hi, pages, runs }, pageBytes) {
  const found = [];
  let cell = Math.floor(lo / pages);
  for (let i = 0; i < runs.length; i += 3) {
    const [cells, live, cached] = runs.slice(i, i + 3);
    const first = Math.max(lo, cell * pages);
    const end = Math.min(hi, (cell + cells) * pages);
    found.push({ lo: first * pageBytes, hi: end * pageBytes, first, end, live: cells * live, cached: cells * cached });
    cell += cells;
  }
  return found;
}

/** One line on all of it. */
export function summary({ arena_bytes: total, gap_bytes: gap, groups }) {
  const share = (state) => percent(groups.reduce((sum, group) => sum + group.bytes[state], 0) / total);
  const shares = `${share("live")} live, ${share("cached")} cached, ${share("hole")} holes, ${percent(gap / total)} gap`;
  return `the whole arena, ${count(total)} B (${bytes(total)}): ${shares}`;
}

/** One line on a part, or on one run of it. */
export function describe(part, run) {
  const where = `bytes ${count((run ?? part).lo)} to ${count((run ?? part).hi)}`;
  const size = (run ?? part).hi - (run ?? part).lo;
  const sizes = size < 1024 ? bytes(size) : `${count(size)} B, ${bytes(size)}`;
  if (part.kind === "region" && run) {
    const holes = run.end - run.first - run.live - run.cached;
    const pages = run.end - run.first === 1 ? `page ${run.first}` : `pages ${count(run.first)} to ${count(run.end - 1)}`;
    return `${part.name}, ${pages}: ${states(run.live, run.cached, holes)} · ${where} (${sizes})`;
  }
  if (part.kind === "region") {
    const { live, cached, hole } = part.group.pages;
    const total = live + cached + hole;
    const pages = `${count(total)} ${total === 1 ? "page" : "pages"} of ${count(part.group.page_bytes)} B`;
    return `${part.name}, ${pages}: ${states(live, cached, hole)} · ${where} (${sizes})`;
  }
  const words = {
    null: "null pages, where padding is written",
    gap: "gap, free for every group",
    tail: "tail, above the last whole page or beyond the walls",
  };
  return `${words[part.kind]} · ${where} (${sizes})`;
}

function states(live, cached, holes) {
  return `${count(live)} live, ${count(cached)} cached, ${count(holes)} ${holes === 1 ? "hole" : "holes"}`;
}
