// Charts over steps, drawn by uPlot. A drag zooms all of them together; the server thins the window out anew.
import { made, number } from "./page.js";

const MARKS = {
  saved: ["--good", "saved"],
  resumed: ["--accent", "resumed"],
  oom_recovered: ["--warn", "ran out of memory, went on"],
  spike: ["--bad", "spike"],
  not_finite: ["--bad", "not finite"],
  left_out: ["--bad", "left out"],
  rolled_back: ["--violet", "rolled back"],
  stalled: ["--warn", "stalled"],
};
const HEIGHT = 200;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function faded(name, share) {
  return `color-mix(in srgb, ${colour(name)} ${share}%, ${colour("--box")})`;
}

export class Chart {
  // ends: values that the y-axis always has; series: {label, colour, width, dash, points, faint}; lines: {value, label}; marks: [step, kind]
  constructor(title, { format = number, isWide = false, ends = [], zoom }) {
    this.ends = ends;
    this.format = format;
    this.zoom = zoom;
    this.lines = [];
    this.marks = [];
    this.box = made("figure", undefined, isWide ? "chart wide" : "chart");
    this.box.append(made("figcaption", title));
    this.place = made("div");
    this.legend = made("p", undefined, "marks");
    this.box.append(this.place, this.legend);
    this.plot = null;
    this.shape = "";
  }

  draw(data, series, { lines = [], marks = [], range }) {
    this.lines = lines.filter((line) => line.value);
    this.marks = marks;
    this.range = range;
    const shape = JSON.stringify(series);
    if (this.plot && this.shape === shape) this.plot.setData(data);
    else this.make(data, series, shape);
    requestAnimationFrame(() => this.newest());
    this.describe();
  }

  make(data, series, shape) {
    this.plot?.destroy();
    this.shape = shape;
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--dim"), grid, ticks: grid, font: "11px system-ui, sans-serif" };
    const options = {
      width: this.width(),
      height: HEIGHT,
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.zoom(null) } },
      scales: { x: { time: false, range: (_, low, high) => this.range ?? [low, high > low ? high : low + 1] }, y: { range: (_, low, high) => this.tall(low, high) } },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 66, values: (_, ticks) => ticks.map(this.format) }],
      series: [{ label: "step" }, ...series.map((one) => this.styled(one))],
      hooks: { draw: [(plot) => this.overlay(plot)], setSelect: [(plot) => this.selected(plot)] },
    };
    this.plot = new uPlot(options, data, this.place);
  }

  // the legend shows the newest values where nobody points at others
  newest() {
    if (!(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx: this.plot.data[0].length - 1 });
  }

  styled({ label, colour: name, width = 1.5, dash, points = false, faint = false }) {
    const stroke = faint ? faded(name, 40) : colour(name);
    return { label, stroke, width, dash, spanGaps: true, points: { show: points, size: 6, fill: stroke }, value: (_, value) => (value === null || value === undefined ? "–" : this.format(value)) };
  }

  width() {
    return Math.max(200, this.box.clientWidth - 16);
  }

  resize() {
    this.plot?.setSize({ width: this.width(), height: HEIGHT });
  }

  tall(low, high) {
    const found = [low, high, ...this.ends, ...this.lines.map((line) => line.value)].filter((value) => Number.isFinite(value));
    if (!found.length) return [0, 1];
    const [least, most] = [Math.min(...found), Math.max(...found)];
    if (this.ends.length > 1) return [Math.min(least, this.ends[0]), Math.max(most, this.ends[1])];
    const room = (most - least || Math.abs(most) || 1) * (this.lines.length ? 0.14 : 0.08);
    return [least >= 0 ? Math.max(0, least - room) : least - room, most + room];
  }

  selected(plot) {
    if (plot.select.width < 4) return;
    const ends = [plot.select.left, plot.select.left + plot.select.width].map((left) => Math.round(plot.posToVal(left, "x")));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (ends[1] > ends[0]) this.zoom(ends);
  }

  overlay(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const [step, kind] of this.marks) {
      const left = Math.round(plot.valToPos(step, "x", true));
      const isSave = kind === "saved";
      ctx.strokeStyle = colour(MARKS[kind][0]);
      ctx.globalAlpha = isSave ? 1 : 0.7;
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top + bbox.height);
      ctx.lineTo(left, isSave ? bbox.top + bbox.height - 9 * devicePixelRatio : bbox.top);
      ctx.stroke();
    }
    ctx.globalAlpha = 1;
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.lineWidth = devicePixelRatio;
    ctx.textAlign = "left";
    ctx.textBaseline = "bottom";
    for (const { value, label } of this.lines) {
      const top = Math.round(plot.valToPos(value, "y", true));
      ctx.strokeStyle = colour("--dim");
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, top);
      ctx.lineTo(bbox.left + bbox.width, top);
      ctx.stroke();
      const [words, left, size] = [`${label} ${this.format(value)}`, bbox.left + 6 * devicePixelRatio, 11 * devicePixelRatio];
      const isAtTop = top - bbox.top < 1.5 * size;  // below the line then
      ctx.fillStyle = colour("--box");
      ctx.globalAlpha = 0.8;
      ctx.fillRect(left - 2, isAtTop ? top + 2 : top - 1.3 * size, ctx.measureText(words).width + 4, 1.2 * size);
      ctx.globalAlpha = 1;
      ctx.fillStyle = colour("--dim");
      ctx.fillText(words, left, isAtTop ? top + 1.3 * size : top - 2 * devicePixelRatio);
    }
    ctx.restore();
  }

  describe() {
    const kinds = [...new Set(this.marks.map(([, kind]) => kind))];
    this.legend.replaceChildren(...kinds.map((kind) => {
      const part = made("span", MARKS[kind][1], "mark");
      part.dataset.kind = kind;
      return part;
    }));
  }
}

export const isMark = ([, kind]) => kind in MARKS;
