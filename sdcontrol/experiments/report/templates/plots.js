// One function per kind of plot. Each draws into its host and returns its stops: places that the
// pointer or the arrow keys can read, as {x, y, lines()}, and along which axis one picks them.

const isShown = (arm) => page.shown.has(arm);
const ink = (arm) => `arm-${page.data.arms[arm].color}`;
const named = (arm) => page.data.arms[arm].name;
const fitting = (arm, width) => shorten(named(arm), Math.floor(width / 9));
const seriesPoints = (series) => series.stretches.flat();

function frameOf(host, height, right = 14) {
  const width = Math.max(260, host.clientWidth);
  return { width, height, left: 50, right: width - right, top: 34, bottom: height - 44 };
}

function emptyNote(host) {
  const note = document.createElement("p");
  note.className = "empty";
  note.textContent = "Nothing to draw: no shown arm has these numbers.";
  host.replaceChildren(note);
  return { pick: "x", stops: [] };
}

const PLOTS = {
  chart(host, plot) {
    const series = plot.series.filter((one) => isShown(one.arm));
    if (!series.length) return emptyNote(host);
    const labelled = plot.pick === "x" && host.clientWidth > 640;
    const names = labelled ? 80 + series.length * LABEL_PITCH : 0; // room for the names at the lines' ends
    const frame = frameOf(host, Math.max(host.clientWidth < 500 ? 260 : 330, names), labelled ? 130 : 14);
    const svg = canvas(host, frame.width, frame.height);
    const points = series.flatMap(seriesPoints);
    const extra = plot.roof ? [[plot.roof.ridge, plot.roof.peak], [plot.roof.ridge, plot.roof.peak * 1.6]] : [];
    let xs = [...points, ...extra].map((point) => point[0]);
    let ys = [...points, ...extra].map((point) => point[1]);
    if (plot.isDiagonal) xs = ys = [...xs, ...ys];
    if (plot.values) ys = [...ys, ...plot.values];
    const scales = axes(svg, frame, { ...plot.x, ...domainOf(plot.x, xs) }, { ...plot.y, ...domainOf(plot.y, ys) });
    if (plot.isDiagonal) diagonal(svg, scales, domainOf(plot.x, xs).domain);
    if (plot.roof) roof(svg, scales, plot.roof, domainOf(plot.x, xs).domain);
    plot.under?.(svg, scales);
    for (const one of series) (one.dots ? dots : lines)(svg, scales, one);
    if (labelled) endLabels(svg, scales, series);
    return { svg, frame, pick: plot.pick, stops: stopsOf(plot, series, scales) };
  },

  blocks(host, plot) {
    const metric = plot.choices[page.metric];
    if (!metric) return emptyNote(host);
    const intervals = metric.intervals.filter((one) => isShown(one.arm));
    const drift = plot.drift?.metric === metric.label ? plot.drift : null;
    return PLOTS.chart(host, {
      pick: "x",
      x: { label: "Block", unit: "", whole: true },
      y: { label: `${metric.label}, ratio to ${shorten(plot.baseline, 24)}`, unit: "×" },
      series: metric.series,
      values: [1, ...intervals.flatMap((one) => [one.low, one.high]), ...(drift?.points.map((point) => point[1]) ?? [])],
      under: (svg, scales) => {
        for (const one of intervals) span(svg, scales, one, `${ink(one.arm)} span`);
        level(svg, scales, 1, "reference");
        for (const [block, ratio] of drift?.points ?? []) {
          draw(svg, "circle", { class: "drift", cx: px(scales.x(block)), cy: px(scales.y(ratio)), r: 4 });
        }
      },
      drift: new Map(drift?.points ?? []),
    });
  },

  forest(host, plot) {
    const rows = plot.rows.filter((row) => isShown(row.arm));
    if (!rows.length) return emptyNote(host);
    const isNarrow = host.clientWidth < 620;
    const pitch = isNarrow ? 78 : 44;
    const width = Math.max(260, host.clientWidth);
    const frame = isNarrow
      ? { left: 8, right: width - 8, top: 30, bottom: 30 + rows.length * pitch }
      : { left: Math.min(220, width * 0.26), right: width - (rows.some((row) => row.verdict.length > 8) ? 350 : 290), top: 30, bottom: 30 + rows.length * pitch };
    const svg = canvas(host, width, frame.bottom + 34);
    const [low, high] = extent([1, ...rows.flatMap((row) => [row.low, row.high])]);
    const room = (high - low) * 0.08 || 0.05;
    const x = linearScale([low - room, high + room], [frame.left, frame.right]);
    for (const tick of linearTicks([low - room, high + room], Math.max(3, (frame.right - frame.left) / 110))) {
      draw(svg, "text", { class: "tick-text", x: px(x(tick)), y: frame.bottom + 24, "text-anchor": "middle" }, `${tidy(tick.toFixed(3))}×`);
    }
    if (!isNarrow) draw(svg, "line", { class: "reference", x1: px(x(1)), x2: px(x(1)), y1: frame.top - 8, y2: frame.bottom + 8 });
    const near = x(1) > frame.right - 70 ? "end" : x(1) < frame.left + 70 ? "start" : "middle";
    draw(svg, "text", { class: "axis", x: px(x(1)), y: frame.top - 14, "text-anchor": near }, `same as ${shorten(plot.baseline, 22)}`);
    rows.forEach((row, place) => forestRow(svg, frame, x, row, { y: frame.top + (place + 0.5) * pitch, isNarrow }));
    const stops = rows.map((row, place) => ({
      x: x(row.value), y: frame.top + (place + 0.5) * pitch,
      lines: () => [[named(row.arm)], ["ratio", withUnit(row.value, "×")], [`${plot.confidence} interval`, `${digits(row.low)} to ${digits(row.high)}`], [row.verdict]],
    }));
    return { svg, frame, pick: "y", stops };
  },

  bands(host, plot) {
    const rows = plot.rows.filter((row) => isShown(row.arm));
    if (!rows.length) return emptyNote(host);
    const pitch = 64;
    const frame = { ...frameOf(host, 34 + rows.length * pitch + 36, host.clientWidth > 640 ? 130 : 14), top: 6 };
    const svg = canvas(host, frame.width, frame.height);
    const axis = axisScale({ ...plot.x, ...domainOf(plot.x, []) }, [frame.left, frame.right], 64);
    const stops = [];
    rows.forEach((row, place) => {
      const top = frame.top + place * pitch + 20;
      draw(svg, "text", { class: "row-name", x: frame.left, y: top - 6 }, fitting(row.arm, frame.right - frame.left));
      band(svg, plot, row, { x: axis.at, top, height: pitch - 26 });
      for (const bin of row.bins) {
        stops.push({ x: axis.at((bin[0] + 0.5) * plot.width), y: top + (pitch - 26) / 2, lines: () => bandLines(plot, row, bin) });
      }
    });
    for (const tick of axis.ticks) {
      draw(svg, "text", { class: "tick-text", x: px(axis.at(tick)), y: frame.bottom + 19, "text-anchor": "middle" }, axis.text(tick));
    }
    draw(svg, "text", { class: "axis", x: frame.right, y: frame.bottom + 37, "text-anchor": "end" }, axis.name);
    return { svg, frame, pick: "xy", stops };
  },

  bars(host, plot) {
    const rows = plot.rows.filter((row) => isShown(row.arm));
    if (!rows.length) return emptyNote(host);
    const columns = Math.max(1, Math.min(rows.length, Math.floor(host.clientWidth / 270)));
    const width = Math.max(260, host.clientWidth);
    const cell = { width: (width - 24 * (columns - 1)) / columns, height: 190 };
    const svg = canvas(host, width, Math.ceil(rows.length / columns) * cell.height + 26);
    const most = Math.max(...rows.map(tallest)); // one scale, so that panels can be compared
    const stops = [];
    rows.forEach((row, place) => {
      const left = (place % columns) * (cell.width + 24);
      const top = Math.floor(place / columns) * cell.height;
      stops.push(...barPanel(svg, plot, row, { left, top, most, ...cell }));
    });
    draw(svg, "text", { class: "axis", x: width, y: Math.ceil(rows.length / columns) * cell.height + 18, "text-anchor": "end" }, "Draft tokens per request and step");
    return { svg, pick: "xy", stops };
  },

  shares(host, plot) {
    const rows = plot.rows.filter((row) => isShown(row.arm));
    if (!rows.length) return emptyNote(host);
    const width = Math.max(260, host.clientWidth);
    const svg = canvas(host, width, rows.length * 56 + 8);
    const stops = [];
    rows.forEach((row, place) => {
      const top = place * 56 + 22;
      draw(svg, "text", { class: "row-name", x: 0, y: top - 7 }, fitting(row.arm, width));
      let from = 0;
      row.parts.forEach((share, part) => {
        const long = share * width;
        const name = plot.parts[part];
        draw(svg, "rect", { class: `part-${part} slice`, x: px(from), y: top, width: px(Math.max(0, long - 1)), height: 22 });
        const text = `${name} ${(share * 100).toFixed(0)} %`;
        if (long > text.length * 7.4 + 12) draw(svg, "text", { class: `on-part-${part}`, x: px(from + 7), y: top + 15 }, text);
        stops.push({ x: from + long / 2, y: top + 11, lines: () => [[named(row.arm)], [name, withUnit(share * 100, "%")]] });
        from += long;
      });
    });
    return { svg, pick: "xy", stops };
  },
};

function stopsOf(plot, series, scales) {
  if (plot.pick === "xy") {
    return series.flatMap((one) => seriesPoints(one).map(([x, y]) => ({
      x: scales.x(x), y: scales.y(y), arm: one.arm,
      lines: () => [[named(one.arm)], [plot.x.label, withUnit(x, plot.x.unit)], [plot.y.label, withUnit(y, plot.y.unit)]],
    }))).sort((a, b) => a.x - b.x);
  }
  const along = plot.pick === "x" ? 0 : 1;
  const axis = along ? plot.y : plot.x;
  const rows = new Map();
  for (const one of series) {
    for (const point of seriesPoints(one)) {
      if (!rows.has(point[along])) rows.set(point[along], []);
      rows.get(point[along]).push([one.arm, point[1 - along]]);
    }
  }
  const other = along ? plot.x : plot.y;
  return [...rows].sort((a, b) => a[0] - b[0]).map(([key, values]) => ({
    x: along ? scales.frame.left : scales.x(key),
    y: along ? scales.y(key) : scales.frame.top,
    lines: () => [
      [along ? `p${key}` : axis.unit ? withUnit(key, axis.unit) : `${axis.label} ${key}`],
      ...values.map(([arm, value]) => [named(arm), withUnit(value, other.unit), ink(arm)]),
      ...(plot.drift?.has(key) ? [["A/A: baseline repeated", withUnit(plot.drift.get(key), "×")]] : []),
    ],
  }));
}
