// Frames as series over time, bounded.

export const SPAN = 300; // seconds kept
const RATE_WINDOW = 3; // seconds that a rate is the mean of
const HIT_WINDOW = 30;

/** A counter that starts again at 0 when its process does, as what it grew by since the page was opened. */
class Growth {
  #last = null;
  total = 0;

  add(value) {
    if (this.#last !== null) this.total += value >= this.#last ? value - this.#last : value;
    this.#last = value;
    return this.total;
  }
}

export class History {
  #growth = {};
  points = []; // oldest first

  add(frame) {
    const { pool, totals, refused } = frame;
    const grown = (name, value) => (this.#growth[name] ??= new Growth()).add(value);
    const point = {
      time: frame.time,
      prompt: grown("prompt", totals.prompt_tokens),
      generated: grown("generated", totals.generation_tokens),
      queries: grown("queries", totals.prefix_cache_queries),
      hits: grown("hits", totals.prefix_cache_hits),
      turnedAway: grown("turnedAway", Object.values(refused).reduce((sum, n) => sum + n, 0)),
      pool,
      running: pool?.running ?? null,
      waiting: pool?.waiting ?? null,
      moved: this.#growth.moved?.total ?? 0,
      preemptions: this.#growth.preemptions?.total ?? 0,
      refusals: this.#growth.refusals?.total ?? 0,
    };
    if (pool) {
      point.moved = grown("moved", pool.groups.reduce((sum, group) => sum + group.moved_bytes, 0));
      point.preemptions = grown("preemptions", pool.preemptions);
      point.refusals = grown("refusals", pool.refusals);
    }
    point.promptRate = this.#rate(point, "prompt");
    point.generatedRate = this.#rate(point, "generated");
    point.movedRate = this.#rate(point, "moved");
    point.hitRate = this.#hitRate(point);
    this.points.push(point);
    const oldest = point.time - SPAN;
    while (this.points[0].time < oldest) this.points.shift();
  }

  get newest() {
    return this.points.at(-1);
  }

  #since(time) {
    return this.points.find((point) => point.time >= time);
  }

  #rate(point, name) {
    const past = this.#since(point.time - RATE_WINDOW);
    return past ? (point[name] - past[name]) / (point.time - past.time) : 0;
  }

  #hitRate(point) {
    const past = this.#since(point.time - HIT_WINDOW);
    const asked = past ? point.queries - past.queries : 0;
    return asked ? (point.hits - past.hits) / asked : null;
  }
}
