// Light, dark, or as the system has it; and the colours that canvases need.

const THEMES = ["auto", "light", "dark"];
const GROUPS = 6; // colours of layer groups in style.css
const listeners = [];

/** `listener` is called whenever colours may have changed. */
export function onTheme(listener) {
  listeners.push(listener);
}

export function start(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", tell);
  apply(localStorage.getItem("theme") ?? "auto", button);
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("theme", next);
    apply(next, button);
  });
}

/** The colour that a custom property of style.css has now. */
export function color(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** The custom property with the colour of a layer group: groups keep theirs while their order does not change. */
export const groupColor = (index) => `group-${index % GROUPS}`;

/** Stripes on a lighter ground, for cached pages. */
export function stripes(ink, ground) {
  const tile = document.createElement("canvas");
  const size = 6 * devicePixelRatio;
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, size, size);
  pen.globalAlpha = 0.32;
  pen.fillStyle = ink;
  pen.fillRect(0, 0, size, size);
  pen.globalAlpha = 1;
  pen.strokeStyle = ink;
  pen.lineWidth = size / 4;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - size / 2, size * 1.5);
    pen.lineTo(shift + size * 1.5, -size / 2);
    pen.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

function apply(theme, button) {
  document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "auto";
  button.textContent = `Theme: ${document.documentElement.dataset.theme}`;
  tell();
}

function tell() {
  for (const listener of listeners) listener();
}
