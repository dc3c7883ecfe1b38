// What plots are made of: lines, dots, bars, ceilings, labels.

function lines(svg, { x, y }, series) {
  const path = series.stretches
    .map((points) => points.map(([a, b], place) => `${place ? "L" : "M"}${px(x(a))} ${px(y(b))}`).join(""))
    .join("");
  draw(svg, "path", { class: `${ink(series.arm)} line`, d: path, "data-arm": series.arm });
  if (seriesPoints(series).length <= 40) dots(svg, { x, y }, series, "sparse");
}

// One path of points without length, round at their ends: thousands cost no more than one element.
function dots(svg, { x, y }, series, kind = "dense") {
  const path = seriesPoints(series).map(([a, b]) => `M${px(x(a))} ${px(y(b))}h0`).join("");
  draw(svg, "path", { class: `${ink(series.arm)} dots ${kind}`, d: path, "data-arm": series.arm });
}

const LABEL_PITCH = 16;

function endLabels(svg, { x, y, frame }, series) {
  const labels = series
    .map((one) => ({ arm: one.arm, last: seriesPoints(one).at(-1) }))
    .filter((one) => one.last)
    .map((one) => ({ ...one, y: y(one.last[1]) }))
    .sort((a, b) => a.y - b.y);
  labels.forEach((one, place) => {
    if (place) one.y = Math.max(one.y, labels[place - 1].y + LABEL_PITCH);
  });
  let lowest = frame.bottom;
  for (const one of [...labels].reverse()) { // back up, as far as the frame's end and those below ask
    one.y = Math.min(one.y, lowest);
    lowest = one.y - LABEL_PITCH;
  }
  for (const one of labels) {
    draw(svg, "line", { class: `${ink(one.arm)} leader`, x1: px(x(one.last[0]) + 4), y1: px(y(one.last[1])), x2: frame.right + 6, y2: px(one.y) });
    draw(svg, "text", { class: `${ink(one.arm)} label`, x: frame.right + 10, y: px(one.y + 4) }, shorten(named(one.arm), 15));
  }
}

function level(svg, { y, frame }, value, kind) {
  draw(svg, "line", { class: kind, x1: frame.left, x2: frame.right, y1: px(y(value)), y2: px(y(value)) });
}

function span(svg, { y, frame }, interval, kind) {
  const [top, bottom] = [y(interval.high), y(interval.low)];
  draw(svg, "rect", { class: kind, x: frame.left, width: frame.right - frame.left, y: px(top), height: px(Math.max(1, bottom - top)) });
}

function diagonal(svg, { x, y }, [low, high]) {
  draw(svg, "line", { class: "reference", x1: px(x(low)), y1: px(y(low)), x2: px(x(high)), y2: px(y(high)) });
  draw(svg, "text", { class: "axis", x: px(x(high)) - 8, y: px(y(high)) - 6, "text-anchor": "end" }, "as predicted");
}

function roof(svg, { x, y, frame }, { peak, bandwidth, ridge }, [low, high]) {
  const first = { x: x(low), y: y(bandwidth * low) };
  const slopeBottom = Math.min(first.y, frame.bottom);
  const startX = first.y > frame.bottom ? x(ridge) - ((frame.bottom - y(peak)) * (x(ridge) - first.x)) / (first.y - y(peak)) : first.x;
  draw(svg, "path", { class: "roof", d: `M${px(startX)} ${px(slopeBottom)}L${px(x(ridge))} ${px(y(peak))}H${px(x(high))}` });
  draw(svg, "line", { class: "reference", x1: px(x(ridge)), x2: px(x(ridge)), y1: px(y(peak)), y2: frame.bottom });
  const isRight = x(ridge) > (frame.left + frame.right) / 2;
  draw(svg, "text", { class: "axis", x: px(x(ridge)) + (isRight ? -6 : 6), y: frame.bottom - 8, "text-anchor": isRight ? "end" : "start" }, `ridge ${digits(ridge)} FLOPs/byte`);
  draw(svg, "text", { class: "axis", x: frame.right, y: px(y(peak)) - 8, "text-anchor": "end" }, `peak ${withUnit(peak, "FLOP/s")} · memory ${withUnit(bandwidth, "B/s")}`);
}

function forestRow(svg, frame, x, row, { y, isNarrow }) {
  const gain = { faster: "gain", better: "gain", slower: "loss", worse: "loss" }[row.verdict] ?? "same";
  const sign = { gain: "▲ ", loss: "▼ ", same: "○ " }[gain];
  const ratio = `${row.value.toFixed(2)}×`;
  const within = `${row.low.toFixed(2)} to ${row.high.toFixed(2)}`;
  const barY = isNarrow ? y + 26 : y;
  draw(svg, "line", { class: "track", x1: frame.left, x2: frame.right, y1: barY, y2: barY });
  draw(svg, "line", { class: `${ink(row.arm)} whisker`, x1: px(x(row.low)), x2: px(x(row.high)), y1: barY, y2: barY });
  draw(svg, "circle", { class: `${ink(row.arm)} knob`, cx: px(x(row.value)), cy: barY, r: 7 });
  const name = isNarrow ? { x: 0, y: y - 20 } : { x: 0, y: y + 5 };
  if (isNarrow) draw(svg, "line", { class: "reference", x1: px(x(1)), x2: px(x(1)), y1: barY - 10, y2: barY + 10 });
  draw(svg, "text", { class: "row-name", ...name }, fitting(row.arm, isNarrow ? frame.right : frame.left));
  const right = isNarrow ? { x: 0, y: y + 6 } : { x: frame.right + 24, y: y + 6 };
  const text = draw(svg, "text", { class: `${gain} headline`, ...right });
  draw(text, "tspan", { class: "ratio" }, `${sign}${ratio} `);
  draw(text, "tspan", { class: "within" }, ` ${within}, ${row.verdict}`);
}

function band(svg, plot, row, { x, top, height }) {
  const last = (row.bins.at(-1)[0] + 1) * plot.width;
  draw(svg, "rect", { class: "well", x: px(x(0)), y: top, width: px(x(last) - x(0)), height });
  plot.choices.forEach((choice, which) => {
    let path = "";
    for (const [place, shares] of row.bins) {
      if (!shares[which]) continue;
      const below = shares.slice(0, which).reduce((sum, share) => sum + share, 0);
      const from = top + height * (1 - below - shares[which]);
      const [left, right] = [Math.round(x(place * plot.width)), Math.round(x((place + 1) * plot.width))];
      path += `M${left} ${px(from)}H${right}V${px(top + height * (1 - below))}H${left}Z`;
    }
    if (path) draw(svg, "path", { class: `drafter-${choice.drafter % 6} area`, "fill-opacity": opacity(choice), d: path, "data-arm": row.arm });
  });
}

const opacity = (choice) => (choice.strength ? px(0.35 + 0.65 * choice.strength) : 1);

function bandLines(plot, row, [place, shares]) {
  const parts = shares
    .map((share, which) => [plot.choices[which].label, share, plot.choices[which].drafter])
    .filter(([, share]) => share > 0)
    .sort((a, b) => b[1] - a[1])
    .slice(0, 6);
  return [
    [`${named(row.arm)}, at ${withUnit(place * plot.width, plot.x.unit)}`],
    ...parts.map(([label, share, drafter]) => [label, withUnit(share * 100, "%"), `drafter-${drafter % 6}`]),
  ];
}

function tallest(row) {
  const totals = new Map();
  for (const [length, , share] of row.bars) totals.set(length, (totals.get(length) ?? 0) + share);
  return Math.max(...totals.values());
}

function barPanel(svg, plot, row, { left, top, width, height, most }) {
  const frame = { left: left + 44, right: left + width, top: top + 34, bottom: top + height - 26 };
  const y = linearScale([0, most * 1.12], [frame.bottom, frame.top]);
  const slot = (frame.right - frame.left) / (plot.longest + 1);
  draw(svg, "text", { class: "row-name", x: left, y: top + 18 }, fitting(row.arm, width));
  const every = Math.ceil(28 / slot);
  for (let length = 0; length <= plot.longest; length += every) {
    draw(svg, "text", { class: "tick-text", x: px(frame.left + (length + 0.5) * slot), y: frame.bottom + 18, "text-anchor": "middle" }, length || "off");
  }
  for (const tick of linearTicks([0, most], 2).slice(1)) {
    draw(svg, "text", { class: "tick-text", x: frame.left - 6, y: px(y(tick) + 4), "text-anchor": "end" }, `${Math.round(tick * 100)}%`);
  }
  draw(svg, "line", { class: "base", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom });
  const stops = [];
  const stacked = new Map();
  for (const [length, drafter, share] of row.bars) {
    const below = stacked.get(length) ?? 0;
    stacked.set(length, below + share);
    const [x, from] = [frame.left + (length + 0.14) * slot, y(below + share)];
    draw(svg, "rect", { class: `drafter-${drafter % 6} area`, x: px(x), y: px(from), width: px(slot * 0.72), height: px(Math.max(0.5, y(below) - from)), "data-arm": row.arm });
    const name = length ? `${plot.drafters[drafter]} ${length}` : plot.drafters[drafter];
    stops.push({ x: x + slot * 0.36, y: (from + y(below)) / 2, lines: () => [[named(row.arm)], [name, withUnit(share * 100, "%"), `drafter-${drafter % 6}`]] });
  }
  return stops;
}
