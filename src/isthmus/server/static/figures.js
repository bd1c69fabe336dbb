// The figures in a row of tiles, and the arena as a table whose last line is added up here, not taken on trust.

import { bytes, count, element, percent, rate } from "./format.js";
import { groupColor } from "./theme.js";

export function showTiles(list, frame, point) {
  const { pool } = frame;
  const live = pool.groups.reduce((sum, group) => sum + group.bytes.live, 0);
  const cached = pool.groups.reduce((sum, group) => sum + group.bytes.cached, 0);
  const tiles = [
    ["running", count(pool.running), pool.waiting ? `${count(pool.waiting)} waiting` : "none waiting"],
    ["generated", `${rate(point.generatedRate)}`, "tokens a second"],
    ["prompt", `${rate(point.promptRate)}`, "tokens a second"],
    ["prefix hits", point.hitRate === null ? "–" : percent(point.hitRate), "of prompt tokens, last 30 s"],
    ["live", percent(live / pool.arena_bytes), `${bytes(live)} of ${bytes(pool.arena_bytes)}`],
    ["cached", percent(cached / pool.arena_bytes), bytes(cached)],
    ["moved", bytes(point.moved), "since this page opened"],
    ["preempted", count(point.preemptions), `${count(point.refusals)} refusals since then`],
  ];
  list.replaceChildren(
    ...tiles.map(([name, value, more]) => {
      const tile = element("div");
      tile.append(element("dt", name), element("dd", value), element("dd", more, { className: "more" }));
      return tile;
    }),
  );
}

export function showFigures(table, { pool }) {
  let sum = 0;
  const cell = (value, label) => {
    sum += value;
    return element("td", count(value), { dataset: { bytes: value, label } });
  };
  const rows = pool.groups.map((group, index) => {
    const { live, cached, hole } = group.bytes;
    const name = element("th", group.name, { scope: "row", className: "group" });
    name.prepend(element("span", "", { className: "swatch", dataset: { color: groupColor(index) } }));
    const row = element("tr");
    row.append(
      name, cell(live, "live"), cell(cached, "cached"), cell(hole, "holes"),
      element("td", count(live + cached + hole), { dataset: { label: "all" } }),
      element("td", count(group.page_bytes), { dataset: { label: "a page" } }),
      element("td", group.frontiers.map(count).join(" – "), { className: "frontiers", dataset: { label: "frontiers" } }),
    );
    return row;
  });
  for (const name of ["gap", "null", "tail"]) {
    const row = element("tr", "", { className: "plain" });
    const value = cell(pool[`${name}_bytes`], name);
    value.colSpan = 4;
    row.append(element("th", name, { scope: "row" }), value, element("td", "", { colSpan: 2, className: "filler" }));
    rows.push(row);
  }
  table.tBodies[0].replaceChildren(...rows);
  const total = element("tr");
  const agrees = sum === pool.arena_bytes;
  const text = `${count(sum)}${agrees ? "" : `, but the arena has ${count(pool.arena_bytes)}`}`;
  total.append(
    element("th", "arena", { scope: "row" }),
    element("td", text, { colSpan: 4, id: "sum", dataset: { sum, agrees } }),
    element("td", agrees ? "the sum of all above" : "", { colSpan: 2, className: "filler" }),
  );
  table.tFoot.replaceChildren(total);
}
