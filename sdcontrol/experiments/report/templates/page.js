// The page's state and its controls: arms, metric, colours, tables, the reading cursor.

const page = {
  data: JSON.parse(document.getElementById("data").textContent),
  shown: new Set(),
  metric: 0,
};
const drawn = new Map();
const tip = document.getElementById("tip");

function redraw() {
  hideTip();
  for (const host of document.querySelectorAll(".plot")) {
    const plot = page.data.plots[host.dataset.plot];
    drawn.set(host, { ...PLOTS[plot.kind](host, plot), at: -1 });
  }
}

function nearest(view, x, y) {
  const weights = { x: [1, 0], y: [0, 1], xy: [1, 1] }[view.pick];
  let best = { distance: Infinity, place: -1 };
  view.stops.forEach((stop, place) => {
    const distance = weights[0] * (stop.x - x) ** 2 + weights[1] * (stop.y - y) ** 2;
    if (distance < best.distance) best = { distance, place };
  });
  return best.place;
}

function read(host, place) {
  const view = drawn.get(host);
  const stop = view.stops[place];
  if (!stop) return;
  view.at = place;
  view.svg.querySelector(".cursor")?.remove();
  const cursor = draw(view.svg, "g", { class: "cursor" });
  if (view.pick === "x") draw(cursor, "line", { x1: stop.x, x2: stop.x, y1: view.frame.top, y2: view.frame.bottom });
  else if (view.pick === "y") draw(cursor, "line", { x1: view.frame.left, x2: view.frame.right, y1: stop.y, y2: stop.y });
  else draw(cursor, "circle", { cx: stop.x, cy: stop.y, r: 7 });
  showTip(host, stop);
}

function showTip(host, stop) {
  tip.replaceChildren(...stop.lines().map(([label, value, kind], place) => {
    const line = document.createElement("div");
    line.className = place ? "tip-line" : "tip-head";
    if (kind) line.append(Object.assign(document.createElement("i"), { className: `swatch ${kind}` }));
    line.append(Object.assign(document.createElement("span"), { textContent: label }));
    if (value !== undefined) line.append(Object.assign(document.createElement("b"), { textContent: value }));
    return line;
  }));
  tip.hidden = false;
  const box = host.getBoundingClientRect();
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const right = box.left + stop.x + 16;
  const left = right > room ? box.left + stop.x - tip.offsetWidth - 16 : right;
  tip.style.left = `${Math.max(8, Math.min(room, left)) + window.scrollX}px`;
  tip.style.top = `${box.top + window.scrollY + Math.max(0, stop.y - 10)}px`;
}

function hideTip() {
  tip.hidden = true;
  for (const cursor of document.querySelectorAll(".cursor")) cursor.remove();
}

function onKey(event) {
  const view = drawn.get(event.currentTarget);
  const last = view.stops.length - 1;
  const stride = Math.max(1, Math.round(view.stops.length / 100));
  const moves = {
    ArrowRight: view.at + stride, ArrowUp: view.at + stride, ArrowLeft: view.at - stride, ArrowDown: view.at - stride,
    Home: 0, End: last,
  };
  if (event.key === "Escape") hideTip();
  if (!(event.key in moves) || last < 0) return;
  event.preventDefault();
  read(event.currentTarget, Math.max(0, Math.min(last, moves[event.key])));
}

function setUpPlot(host) {
  const point = (event) => {
    const box = host.getBoundingClientRect();
    read(host, nearest(drawn.get(host), event.clientX - box.left, event.clientY - box.top));
  };
  host.addEventListener("pointermove", point);
  host.addEventListener("pointerdown", point);
  host.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hideTip());
  host.addEventListener("blur", hideTip);
  host.addEventListener("keydown", onKey);
}

function setUpArm(button) {
  const arm = Number(button.dataset.arm);
  page.shown.add(arm);
  button.addEventListener("click", () => {
    const isOn = !page.shown.has(arm);
    page.shown[isOn ? "add" : "delete"](arm);
    button.setAttribute("aria-pressed", String(isOn));
    redraw();
  });
}

function setUpTheme(button) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const show = () => button.setAttribute("aria-pressed", String((document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark"));
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();
}

function sortBy(head) {
  const rises = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", rises ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0];
  const key = (row) => row.cells[head.cellIndex].dataset.order;
  const isNumeric = [...body.rows].every((row) => key(row) !== "" && Number.isFinite(Number(key(row))));
  const compare = isNumeric ? (a, b) => Number(key(a)) - Number(key(b)) : (a, b) => key(a).localeCompare(key(b), "en");
  body.append(...[...body.rows].sort((a, b) => (rises ? 1 : -1) * compare(a, b)));
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const details = target?.closest("details");
  if (!details || details.open) return;
  details.open = true;
  target.scrollIntoView();
}

document.documentElement.classList.add("scripted");
document.querySelectorAll("[data-arm]").forEach(setUpArm);
document.querySelectorAll(".plot").forEach(setUpPlot);
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => sortBy(button.closest("th"))));
document.getElementById("metric")?.addEventListener("change", (event) => {
  page.metric = Number(event.target.value);
  redraw();
});
document.addEventListener("pointerdown", (event) => event.target.closest(".plot") || hideTip());
setUpTheme(document.getElementById("theme"));
window.addEventListener("hashchange", openTarget);
redraw();
openTarget();

let knownWidth = document.documentElement.clientWidth;
window.addEventListener("resize", () => {
  const width = document.documentElement.clientWidth;
  if (width !== knownWidth) requestAnimationFrame(redraw);
  knownWidth = width;
});
