// Numbers as text.

const whole = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (n) => whole.format(n);

export function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit && n < 100 ? n.toFixed(n < 10 ? 2 : 1) : Math.round(n)} ${UNITS[unit]}`;
}

export function rate(n) {
  return n >= 100 || n === 0 ? count(Math.round(n)) : n.toFixed(1);
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function seconds(s) {
  if (s < 0.0995) return `${Math.round(1000 * s)} ms`;
  return s < 100 ? `${s.toFixed(1)} s` : `${count(Math.round(s))} s`;
}

/** An element with text; `options` are its properties, `dataset` among them. Text is never read as HTML. */
export function element(tag, text = "", options = {}) {
  const { dataset = {}, ...properties } = options;
  const made = Object.assign(document.createElement(tag), properties);
  made.textContent = text;
  Object.assign(made.dataset, dataset);
  return made;
}
