// Numbers, scales and SVG elements. Knows nothing of arms or plots.

const UNITS = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  "FLOP/s": [[1e12, "TFLOP/s"], [1e9, "GFLOP/s"], [1e6, "MFLOP/s"], [1e3, "kFLOP/s"], [1, "FLOP/s"]],
  "B/s": [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1, "B/s"]],
};

// The unit in which `value` is at least one.
function unitFor(value, unit) {
  const steps = UNITS[unit] ?? [[1, unit]];
  const [size, name] = steps.find(([step]) => Math.abs(value) >= step * (1 - 1e-9)) ?? steps.at(-1);
  return { size, name };
}

function digits(value, significant = 3) {
  if (value === 0) return "0";
  const places = significant - 1 - Math.floor(Math.log10(Math.abs(value)));
  const text = Math.abs(value).toFixed(Math.min(8, Math.max(0, places)));
  const [whole, rest] = text.split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return (value < 0 ? "\u2212" : "") + (rest ? `${grouped}.${rest}` : grouped);
}

function withUnit(value, unit) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (unit === "%") return `${digits(value, value >= 10 ? 2 : 1)} %`;
  const { size, name } = unitFor(value, unit);
  return name === "×" ? `${digits(value, 4)}×` : `${digits(value / size)} ${name}`.trim();
}

const tidy = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

function linearScale([low, high], [from, to]) {
  const slope = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * slope;
}

function logScale([low, high], range) {
  const scale = linearScale([Math.log10(low), Math.log10(high)], range);
  return (value) => scale(Math.log10(value));
}

function linearTicks([low, high], wanted) {
  const rough = (high - low || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * (1 - 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step);
  return ticks;
}

// Decades, with as many places between them as have room.
function logTicks([low, high], wanted) {
  for (const factors of [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const factor of factors) ticks.push(Number((factor * 10 ** power).toPrecision(6)));
    }
    const shown = ticks.filter((tick) => tick >= low && tick <= high);
    if (shown.length <= wanted) return shown;
    if (factors.length === 1) return shown.filter((_, place) => place % Math.ceil(shown.length / wanted) === 0);
  }
  return [];
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

function draw(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  parent.append(element);
  return element;
}

const px = (value) => Math.round(value * 10) / 10;
const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
