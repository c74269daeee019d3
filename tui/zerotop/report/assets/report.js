// Draws the charts of the page with uPlot from the JSON in #charts-data. Needs no network.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("charts-data").textContent);
  const root = document.documentElement;
  const choice = document.getElementById("rank");
  const sync = uPlot.sync("report");
  let plots = [];
  let zoom = null; // [from, to] shared by all charts with the same kind of x

  const colour = name => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const short = value => {
    if (value == null) return "–";
    const size = Math.abs(value);
    return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : 2 });
  };
  const two = number => String(number).padStart(2, "0");
  const clock = seconds => {
    const whole = Math.floor(seconds);
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  };
  const fraction = (seconds, step) => (step < 1 ? clock(seconds) + (seconds % 1).toFixed(step < 0.1 ? 2 : 1).slice(1) : clock(seconds));

  // Series of a chart with its x values: samples are evenly spaced and differ by rank.
  function readChart(chart) {
    if (chart.x) return { x: chart.x, series: chart.series };
    const series = chart.ranks[choice ? choice.value : Object.keys(chart.ranks)[0]] || [];
    const count = series.length ? series[0].values.length : 0;
    return { x: Array.from({ length: count }, (_, i) => chart.x0 + (i + 1) * chart.dx), series };
  }

  // Values as drawn: those of a stack lie on the sum of the series before them.
  function stack(series) {
    const sums = [];
    let below = null;
    for (const one of series) {
      if (one.line) {
        sums.push(one.values);
      } else {
        below = one.values.map((value, i) => (value == null ? null : value + (below ? below[i] || 0 : 0)));
        sums.push(below);
      }
    }
    return sums;
  }

  // Crosses at the upper edge, where a series ran out of memory.
  function drawFailures(plot, series) {
    const { ctx, bbox } = plot, size = 4 * devicePixelRatio;
    ctx.save();
    ctx.lineWidth = 2 * devicePixelRatio;
    series.forEach((one, row) => {
      for (const at of one.failed || []) {
        const x = plot.valToPos(at, "x", true), y = bbox.top + (1 + 2.5 * row) * size;
        ctx.strokeStyle = colour(one.colour);
        ctx.beginPath();
        ctx.moveTo(x - size, y - size);
        ctx.lineTo(x + size, y + size);
        ctx.moveTo(x - size, y + size);
        ctx.lineTo(x + size, y - size);
        ctx.stroke();
      }
    });
    ctx.restore();
  }

  function drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.font = `600 ${Math.round(11 * devicePixelRatio)}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    let last = -Infinity, raised = 0;
    for (const mark of [...data.marks].sort((a, b) => a.x - b.x)) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      raised = x - last < 16 * devicePixelRatio ? raised + 1 : 0;
      last = x;
      ctx.strokeStyle = ctx.fillStyle = colour(mark.level === "error" ? "error" : "warning");
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (raised < 3) ctx.fillText(mark.number, x + 14 * raised * devicePixelRatio, bbox.top - 4 * devicePixelRatio);
    }
    ctx.restore();
  }

  function drawLimit(plot, limit) {
    const scale = plot.scales.y;
    if (limit == null || limit > scale.max) return;
    const { ctx, bbox } = plot, y = plot.valToPos(limit, "y", true);
    ctx.save();
    ctx.strokeStyle = colour("muted");
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  // The values of the horizontal axis whose labels do not overlap; the last one always has its label.
  function chooseTicks(plot, x, label) {
    const room = value => 7 * label(value).length + 10;
    const chosen = [];
    let end = Infinity;
    for (const value of [...x].reverse()) {
      const middle = plot.valToPos(value, "x");
      if (middle + room(value) / 2 > end) continue;
      chosen.unshift(value);
      end = middle - room(value) / 2;
    }
    return chosen;
  }

  function draw(chart, width) {
    const figure = document.getElementById(`chart-${chart.id}`);
    const { x, series } = readChart(chart);
    const stacked = chart.kind === "stack";
    const drawn = stacked ? stack(series) : series.map(one => one.values);
    // The top of a stack is drawn first, the parts before it over it.
    const order = series.map((_, i) => i);
    if (stacked) order.sort((a, b) => Boolean(series[a].line) - Boolean(series[b].line) || b - a);
    const hidden = new Set();
    const stepped = uPlot.paths.stepped({ align: -1 });
    const axis = { stroke: colour("muted"), grid: { stroke: colour("panel"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const top = chart.limit == null ? null : chart.limit;
    const label = value => (chart.labels ? chart.labels[x.indexOf(value)] : short(value));
    const options = {
      width,
      height: Math.max(150, Math.min(240, width * 0.3)),
      padding: [16, 22, 0, 0],
      cursor: {
        sync: { key: "report", scales: ["x", null] },
        points: { show: false },
        drag: { x: chart.kind !== "points", y: false },
        // Pieces end at their x: the cursor is in the piece whose end comes next.
        dataIdx: (plot, _, nearest, at) => (chart.x && chart.kind !== "points" && x[nearest] < at ? Math.min(nearest + 1, x.length - 1) : nearest),
      },
      scales: {
        x: {
          time: false,
          range: (plot, low, high) => {
            const edge = chart.kind === "points" ? (high - low || 1) * 0.04 : 0;
            return zoom || [low - edge, high + edge];
          },
        },
        y: { range: (plot, low, high) => [0, high > 0 ? (top != null && high > 0.5 * top ? Math.max(top, high) * 1.02 : high * 1.1) : 1] },
      },
      axes: [
        chart.kind === "points"
          ? { ...axis, size: 28, splits: plot => chooseTicks(plot, x, label), values: (plot, splits) => splits.map(label) }
          : { ...axis, size: 28, values: (plot, splits) => splits.map(value => fraction(value, splits[1] - splits[0])) },
        { ...axis, size: 52, values: (plot, splits) => splits.map(short) },
      ],
      series: [
        {
          label: chart.axis || "time",
          value: (plot, value, _, index) => {
            if (value == null) return "–";
            if (chart.kind === "points") return label(value);
            const step = chart.steps && chart.steps[index];
            return clock(value) + (step == null ? "" : `, step ${step}`);
          },
        },
        ...order.map(number => {
          const one = series[number], tint = colour(one.colour);
          return {
            label: one.name,
            stroke: tint,
            width: stacked && !one.line ? 0 : 1.5,
            fill: stacked && !one.line ? tint : one.fill ? `${tint}33` : undefined,
            points: { show: chart.kind === "points", size: 7, fill: tint },
            spanGaps: chart.kind === "points",
            paths: chart.x && chart.kind !== "points" ? stepped : undefined,
            value: (plot, value, _, index) => {
              if (index == null) {
                const known = one.values.filter(each => each != null);
                return known.length ? `${short(Math.max(...known))} max` : "–";
              }
              return `${short(one.values[index])}`;
            },
          };
        }),
      ],
      hooks: {
        draw: [plot => { drawLimit(plot, top); drawFailures(plot, series); drawMarks(plot); }],
        setSelect: [plot => {
          if (plot.select.width < 4) return;
          setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
        }],
        ready: [plot => plot.over.addEventListener("dblclick", () => setZoom(null))],
      },
    };
    figure.replaceChildren();
    const caption = document.createElement("figcaption");
    caption.textContent = chart.title;
    const unit = document.createElement("span");
    unit.textContent = ` ${chart.unit}`;
    caption.append(unit);
    figure.append(caption);
    const plot = new uPlot(options, [x, ...order.map(number => drawn[number])], figure);
    sync.sub(plot);
    plots.push(plot);
  }

  function setZoom(range) {
    zoom = range && range[1] > range[0] ? range : data.end ? [0, data.end] : null;
    for (const plot of plots) {
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      const x = plot.data[0];
      plot.setScale("x", { min: zoom ? zoom[0] : x[0], max: zoom ? zoom[1] : x[x.length - 1] });
    }
  }

  function drawAll(width) {
    for (const plot of plots) plot.destroy();
    plots = [];
    if (!zoom && data.end) zoom = [0, data.end];
    const place = document.getElementById("charts");
    for (const chart of data.charts) draw(chart, width || place.clientWidth);
  }

  let known = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width && width !== known && !printing) {
      known = width;
      drawAll(width);
    }
  }).observe(document.getElementById("charts"));
  if (choice) choice.addEventListener("change", () => drawAll());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());

  // Paper is white and 17 cm wide.
  let printing = false;
  addEventListener("beforeprint", () => {
    printing = true;
    root.dataset.theme = "light";
    for (const details of document.querySelectorAll("#findings details")) details.open = true;
    drawAll(640);
  });
  addEventListener("afterprint", () => {
    printing = false;
    delete root.dataset.theme;
    drawAll();
  });

  for (const fix of document.querySelectorAll(".fix")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(fix.textContent);
        button.textContent = "copied";
      } catch { // a frame of a notebook must not write to the clipboard
        getSelection().selectAllChildren(fix);
        button.textContent = "selected";
      }
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    fix.after(" ", button);
  }
})();
