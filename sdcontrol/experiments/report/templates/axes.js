// An empty chart: the SVG with its title, its axes and grid. Knows scales, nothing of series.

function canvas(host, width, height) {
  host.replaceChildren();
  const svg = draw(host, "svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img", focusable: "false",
    "aria-labelledby": `${host.id}-svg-title ${host.id}-svg-desc`,
  });
  draw(svg, "title", { id: `${host.id}-svg-title` }, host.dataset.title);
  draw(svg, "desc", { id: `${host.id}-svg-desc` }, host.dataset.summary);
  return svg;
}

function domainOf(axis, values) {
  if (axis.domain) return { domain: axis.domain, isLog: false };
  let [low, high] = extent(values);
  const isLog = axis.log === true || (axis.log === "auto" && low > 0 && high / low > 30);
  if (isLog) {
    low = low > 0 ? low : 1e-9;
    high = Math.max(high, low);
    return { domain: high / low < 1.5 ? [low / 2, high * 2] : [low / 1.15, high * 1.15], isLog };
  }
  const room = axis.zero ? 0 : (high - low || Math.abs(high) || 1) * 0.08;
  return { domain: [axis.zero ? Math.min(0, low) : low - room, high + (room || high * 0.06 || 1)], isLog };
}

// Scales over a frame [left, top, right, bottom]; draws the grid and the names of the axes.
function axes(svg, frame, xAxis, yAxis) {
  const x = axisScale(xAxis, [frame.left, frame.right], 52);
  const y = axisScale(yAxis, [frame.bottom, frame.top], 48);
  const grid = draw(svg, "g", { class: "grid" });
  for (const tick of y.ticks) {
    draw(grid, "line", { x1: frame.left, x2: frame.right, y1: px(y.at(tick)), y2: px(y.at(tick)) });
    draw(grid, "text", { x: frame.left - 8, y: px(y.at(tick) + 4), "text-anchor": "end" }, y.text(tick));
  }
  for (const tick of x.ticks) {
    const place = px(x.at(tick));
    draw(grid, "line", { x1: place, x2: place, y1: frame.bottom, y2: frame.bottom + 5, class: "tick" });
    draw(grid, "text", { x: place, y: frame.bottom + 19, "text-anchor": "middle" }, x.text(tick));
  }
  draw(grid, "line", { x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom, class: "base" });
  draw(svg, "text", { class: "axis", x: frame.left - 8 < 44 ? 2 : frame.left - 50, y: frame.top - 12 }, y.name);
  draw(svg, "text", { class: "axis", x: frame.right, y: frame.bottom + 37, "text-anchor": "end" }, x.name);
  return { x: x.at, y: y.at, frame };
}

function axisScale(axis, range, pixelsPerTick) {
  const { domain, isLog } = axis;
  const wanted = Math.max(2, Math.floor(Math.abs(range[1] - range[0]) / pixelsPerTick));
  const ticks = (axis.ticks ?? (isLog ? logTicks(domain, wanted + 1) : linearTicks(domain, wanted)))
    .filter((tick) => !axis.whole || Number.isInteger(tick));
  const { size, name } = unitFor(isLog ? Math.sqrt(domain[0] * domain[1]) : domain[1], axis.unit);
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) / size : 1;
  const places = [0, 1, 2, 3, 4, 5].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6) ?? 6;
  return {
    ticks,
    at: (isLog ? logScale : linearScale)(domain, range),
    text: (tick) => tidy(isLog ? digits(tick / size, 2) : (tick / size).toFixed(places)),
    name: name && name !== "×" ? `${axis.label}, ${name}` : axis.label,
  };
}
