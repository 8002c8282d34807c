"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 4"];
  const COLORS = 6;
  const state = { axis: data.axis, whole: data.whole, logX: false, logY: false, zoom: false, smooth: true,
    hidden: new Set(), position: null, plot: null };
  const plots = [];

  for (const run of data.runs) {
    for (const kind of ["loss", "rate", "wait"]) {
      for (const line of run[kind] ? [run[kind].raw, run[kind].smooth] : []) {
        line.tokens = line.tokens || line.steps.map((step) => step * run.step_tokens);
      }
    }
  }

  function make(parent, name, attributes, text) {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function count(value) {
    if (value === null || !isFinite(value)) return "-";
    const size = Math.abs(value);
    for (const [limit, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
      if (size >= limit * (unit === " k" ? 10 : 1)) return String(+(value / limit).toPrecision(4)) + unit;
    }
    return String(+value.toPrecision(4));
  }

  const formats = {
    loss: (value) => (Math.abs(value) < 1e5 ? value.toFixed(4) : value.toPrecision(4)),
    rate: count,
    wait: (value) => value.toFixed(2) + "%",
  };

  const axisFormats = {
    loss: (value) => String(+value.toPrecision(7)),
    rate: count,
    wait: (value) => +value.toPrecision(4) + "%",
  };

  /* The smallest distance of 1, 2 or 5 times a power of ten with at most `wanted` ticks. */
  function tickStep(low, high, wanted) {
    const rough = (high - low) / Math.max(1, wanted);
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * 0.999999);
  }

  function ticks(low, high, wanted, log) {
    if (log) {
      const powers = [];
      const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
      for (let power = first; power <= last; power++) {
        for (const factor of 3 * (last - first) <= wanted + 3 ? [1, 2, 5] : [1]) {
          const value = factor * Math.pow(10, power);
          if (value >= low * 0.999 && value <= high * 1.001) powers.push(value);
        }
      }
      if (powers.length > 1) {
        const stride = Math.ceil(powers.length / Math.max(2, wanted));
        return powers.filter((_, index) => index % stride === 0);
      }
    }
    return high > low ? listTicks(low, high, tickStep(low, high, wanted)) : [low];
  }

  function listTicks(low, high, step) {
    const result = [];
    for (let number = Math.ceil(low / step - 1e-6); number <= high / step + 1e-6; number++) result.push(number * step);
    return result;
  }

  function xOf(series) { return state.axis === "tokens" ? series.tokens : series.steps; }

  function visible(run) { return !state.hidden.has(run); }

  /* Linear between the points of a line; null outside it. */
  function interpolate(x, y, position) {
    if (!x.length || position < x[0] || position > x[x.length - 1]) return null;
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= position) low = middle; else high = middle;
    }
    if (y[low] === null || y[high] === null) return y[low] === null ? y[high] : y[low];
    const width = x[high] - x[low];
    return width > 0 ? y[low] + ((position - x[low]) / width) * (y[high] - y[low]) : y[low];
  }

  /* The range of both axes; without a logarithm, the loss axis begins and ends at a tick. */
  function domain(kind, wanted) {
    let low = Infinity, high = -Infinity, firstX = Infinity, lastX = -Infinity, smallest = Infinity;
    data.runs.forEach((run, index) => {
      const lines = run[kind];
      if (!lines || !visible(index)) return;
      const x = xOf(lines.raw);
      high = Math.max(high, state.whole ? Math.max(...lines.raw.values) : lines.high);
      low = Math.min(low, lines.low); smallest = Math.min(smallest, lines.low);
      for (const value of x) if (value > 0) { firstX = Math.min(firstX, value); break; }
      lastX = Math.max(lastX, x[x.length - 1]);
    });
    if (!isFinite(low)) return null;
    const first = state.zoom ? lastX / 2 : state.logX ? firstX : 0;
    if (state.zoom && kind === "loss") {
      const inside = [];
      data.runs.forEach((run, index) => {
        if (!run[kind] || !visible(index)) return;
        const line = state.smooth ? run[kind].smooth : run[kind].raw;
        xOf(line).forEach((x, point) => { if (x >= first && line.values[point] !== null) inside.push(line.values[point]); });
      });
      if (inside.length) { low = smallest = Math.min(...inside); high = Math.max(...inside); }
    }
    const log = state.logY && kind === "loss" && smallest > 0;
    if (kind !== "loss") low = 0;
    if (high <= low) { high = low + Math.max(Math.abs(low) * 0.1, 1e-6); }
    const step = tickStep(low, high, wanted);
    return { low: log ? low / 1.02 : Math.floor(low / step) * step, high: log ? high * 1.02 : Math.ceil(high / step) * step,
      step, first, last: lastX, logY: log, logX: state.logX && firstX < lastX };
  }

  function draw(plot) {
    const { svg, kind } = plot;
    while (svg.firstChild) svg.removeChild(svg.firstChild);
    const width = svg.clientWidth || 600, height = svg.clientHeight || 300;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const range = domain(kind, height / 36);
    plot.range = range;
    if (!range) { make(svg, "text", { x: 12, y: 24 }, "all lines are hidden"); return; }
    const left = 58, right = 12, top = 12, bottom = 40;
    const scale = (value, low, high, log) =>
      log ? (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (value - low) / (high - low);
    plot.toX = (value) => left + scale(value, range.first, range.last, range.logX) * (width - left - right);
    plot.toY = (value) => height - bottom - scale(value, range.low, range.high, range.logY) * (height - top - bottom);
    plot.fromX = (pixel) => {
      const share = Math.min(1, Math.max(0, (pixel - left) / (width - left - right)));
      return range.logX ? range.first * Math.pow(range.last / range.first, share)
        : range.first + share * (range.last - range.first);
    };
    const { low, high, step } = range;
    for (const value of range.logY ? ticks(low, high, height / 36, true) : listTicks(low, high, step)) {
      const y = plot.toY(value);
      make(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y });
      make(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, axisFormats[kind](value));
    }
    let lastEnd = -Infinity;
    for (const value of ticks(range.first, range.last, width / 95, range.logX)) {
      const x = plot.toX(value), text = count(value), half = text.length * 3.6;
      make(svg, "line", { class: "grid", x1: x, x2: x, y1: height - bottom, y2: height - bottom + 5 });
      const middle = Math.min(x, width - half - 2);
      if (middle - half > lastEnd + 6) {
        make(svg, "text", { x: middle, y: height - bottom + 18, "text-anchor": "middle" }, text);
        lastEnd = middle + half;
      }
    }
    make(svg, "text", { x: left + (width - left - right) / 2, y: height - 5, "text-anchor": "middle" },
      state.axis + (range.logX ? " (logarithmic)" : ""));
    const clip = make(make(svg, "clipPath", { id: "clip-" + kind }), "rect",
      { x: left, y: top - 4, width: width - left - right, height: height - top - bottom + 8 });
    clip.setAttribute("rx", 0);
    const layer = make(svg, "g", { "clip-path": `url(#clip-${kind})` });
    data.runs.forEach((run, index) => {
      const lines = run[kind];
      if (!lines) return;
      const group = make(layer, "g", { "data-run": index });
      if (!visible(index)) { group.setAttribute("hidden", ""); return; }
      const path = (line, attributes) => {
        const x = xOf(line);
        let text = "", pen = false;
        line.values.forEach((value, point) => {
          if (value === null || (range.logX && x[point] <= 0) || (range.logY && value <= 0)) { pen = false; return; }
          text += (pen ? "L" : "M") + plot.toX(x[point]).toFixed(1) + " " + plot.toY(value).toFixed(1);
          pen = true;
        });
        make(group, "path", { d: text, ...attributes });
      };
      const color = "c" + (index % COLORS), dash = DASHES[index % DASHES.length];
      path(lines.raw, { class: color + " raw" + (state.smooth ? "" : " alone"),
        ...(state.smooth || !dash ? {} : { "stroke-dasharray": dash }) });
      if (state.smooth) path(lines.smooth, { class: color, ...(dash ? { "stroke-dasharray": dash } : {}) });
    });
    plot.cross = make(svg, "line", { class: "cross", y1: top, y2: height - bottom, hidden: "" });
    plot.marks = make(svg, "g", {});
  }

  function valueAt(run, kind, position) {
    const lines = run[kind];
    if (!lines) return null;
    const line = state.smooth ? lines.smooth : lines.raw;
    return interpolate(xOf(line), line.values, position);
  }

  /* The line of a run, as in its button. */
  function drawSwatch(parent, index) {
    const dash = DASHES[index % DASHES.length];
    make(parent, "line", { x1: 0, x2: 34, y1: 5, y2: 5, "stroke-width": 3, class: "c" + (index % COLORS),
      ...(dash ? { "stroke-dasharray": dash } : {}) });
  }

  /* The values of one plot next to the pointer; the table above the plots has those of all. */
  function showTip(plot, x) {
    plot.tip.hidden = plot !== state.plot;
    if (plot.tip.hidden) return;
    plot.tip.textContent = "";
    const title = document.createElement("p");
    title.textContent = `${count(state.position)} ${state.axis}`;
    plot.tip.appendChild(title);
    data.runs.forEach((run, index) => {
      const value = visible(index) ? valueAt(run, plot.kind, state.position) : null;
      if (value === null) return;
      const row = document.createElement("p"), name = document.createElement("span"), number = document.createElement("b");
      const swatch = make(row, "svg", { class: "swatch", viewBox: "0 0 34 10", "aria-hidden": "true" });
      drawSwatch(swatch, index);
      name.textContent = run.name;
      number.textContent = formats[plot.kind](value);
      row.append(name, number);
      plot.tip.appendChild(row);
    });
    const width = plot.tip.offsetWidth, space = plot.svg.clientWidth;
    plot.tip.style.left = `${Math.max(0, x + 14 + width > space ? x - 14 - width : x + 14)}px`;
  }

  function showValues() {
    const title = document.getElementById("position");
    const position = state.position;
    title.textContent = position === null
      ? "Move the pointer over a plot, or use the arrow keys in it, to read values."
      : `At ${count(position)} ${state.axis}${state.smooth ? ", smoothed" : ""}:`;
    for (const plot of plots) {
      if (!plot.range || !plot.cross) continue;
      while (plot.marks.firstChild) plot.marks.removeChild(plot.marks.firstChild);
      if (position === null || position < plot.range.first || position > plot.range.last) {
        plot.cross.setAttribute("hidden", "");
        plot.tip.hidden = true;
        continue;
      }
      const x = plot.toX(position);
      plot.cross.removeAttribute("hidden");
      plot.cross.setAttribute("x1", x);
      plot.cross.setAttribute("x2", x);
      data.runs.forEach((run, index) => {
        const value = visible(index) ? valueAt(run, plot.kind, position) : null;
        if (value === null || value < plot.range.low || value > plot.range.high) return;
        make(plot.marks, "circle", { class: "c" + (index % COLORS), cx: x, cy: plot.toY(value), r: 4.5 });
      });
      showTip(plot, x);
    }
    data.runs.forEach((run, index) => {
      const row = document.querySelector(".values tbody").rows[index];
      row.classList.toggle("off", !visible(index));
      plots.forEach(({ kind }, column) => {
        const value = position === null ? null : valueAt(run, kind, position);
        row.cells[column + 1].textContent = value === null ? "-" : formats[kind](value);
      });
    });
  }

  function redraw() { plots.forEach(draw); showValues(); }

  function press(button, on) { button.setAttribute("aria-pressed", on ? "true" : "false"); }

  document.querySelectorAll("svg.plot").forEach((svg) => {
    const plot = { svg, kind: svg.dataset.kind, tip: svg.parentNode.querySelector(".tip") };
    plots.push(plot);
    const move = (event) => {
      if (!plot.range) return;
      state.position = plot.fromX(event.clientX - svg.getBoundingClientRect().left);
      state.plot = plot;
      showValues();
    };
    svg.addEventListener("pointerleave", () => { if (state.plot === plot) { state.plot = null; showValues(); } });
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("keydown", (event) => {
      if (!plot.range) return;
      if (event.key === "Escape") { state.position = state.plot = null; showValues(); return; }
      const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
      if (!step) return;
      event.preventDefault();
      const pixel = state.position === null ? plot.toX(plot.range.first) : plot.toX(state.position);
      state.position = plot.fromX(pixel + step * 6);
      state.plot = plot;
      showValues();
    });
  });
  document.querySelectorAll("button[data-run]").forEach((button) => {
    const index = Number(button.dataset.run);
    drawSwatch(button.querySelector("svg"), index);
    button.addEventListener("click", () => {
      if (state.hidden.has(index)) state.hidden.delete(index); else state.hidden.add(index);
      press(button, visible(index));
      redraw();
    });
  });
  for (const name of ["whole", "logX", "logY", "zoom", "smooth"]) {
    const button = document.getElementById(name);
    button.addEventListener("click", () => { state[name] = !state[name]; press(button, state[name]); redraw(); });
  }
  const axis = document.getElementById("axis");
  if (axis) {
    axis.addEventListener("click", () => {
      state.axis = state.axis === "tokens" ? "steps" : "tokens";
      state.position = null;
      press(axis, state.axis === "steps");
      redraw();
    });
  }
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(redraw); });
  addEventListener("beforeprint", redraw);
  redraw();
})();
