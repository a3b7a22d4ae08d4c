// Charts that share one axis of time, one cursor and one zoom. A table with the same values is behind each.

import { duration, element, number, shortPercent } from "./format.js";

// As wide as the page, so that labels have the size of other text on a phone too.
export const WIDTH = Math.max(320, Math.min(1240, document.getElementById("main").clientWidth - 20));
const LEFT = 78, RIGHT = 12, TOP = 10, BOTTOM = 22;
const SIGNS = { lost: "✕", rejoined: "+", fault: "✶", recovery: "↻", resumed: "▶", checkpoint: "◆", generation: "G", scale: "±", warning: "!", left: "←", end: "■" };

export function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// What all charts of a page look at: the part of time that is shown, and where the cursor is.
export class View extends EventTarget {
  constructor() { super(); this.begin = 0; this.end = 1; this.full = 1; this.cursor = null; this.isZoomed = false; }
  setFull(end) {
    this.full = Math.max(end, 0.001);
    if (!this.isZoomed) { this.begin = 0; this.end = this.full; }
  }
  zoom(begin, end) {
    if (end - begin < 0.001) return;
    this.begin = Math.max(0, begin); this.end = Math.min(this.full, end); this.isZoomed = this.begin > 0 || this.end < this.full;
    this.dispatchEvent(new Event("zoom"));
  }
  reset() { this.isZoomed = false; this.begin = 0; this.end = this.full; this.dispatchEvent(new Event("zoom")); }
  point(at) { this.cursor = at; this.dispatchEvent(new Event("cursor")); }
  x(at) { return LEFT + (at - this.begin) / (this.end - this.begin) * (WIDTH - LEFT - RIGHT); }
  at(x) { return this.begin + (x - LEFT) / (WIDTH - LEFT - RIGHT) * (this.end - this.begin); }
}

const sum = (values) => values.reduce((total, each) => total + each, 0);

export function strokeOf(index) {
  const svg = shape("svg", { class: "stroke", viewBox: "0 0 28 8", "aria-hidden": "true" });
  svg.append(shape("line", { class: `curve c${index % 6}`, x1: 0, x2: 28, y1: 4, y2: 4 }));
  return svg;
}

function powers(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))], step = Math.max(1, Math.ceil((last - first + 1) / 4));
  const found = [];
  for (let power = first; power <= last; power += step) found.push(10 ** power);
  return found.length ? found : [high];
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10].map((factor) => factor * power);
  const from = (step) => {
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
    return found;
  };
  const place = steps.findIndex((each) => each >= raw), found = from(steps[place]);
  return found.length > 1 ? found : from(steps[place - 1]);  // one value says nothing of the scale
}

// Of time: whole minutes and hours, not fifty seconds.
function timeTicks(begin, end, count) {
  const raw = (end - begin) / count, step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((each) => each >= raw);
  if (end - begin < 6 || !step) return ticks(begin, end, count);
  const found = [];
  for (let at = Math.ceil(begin / step) * step; at <= end; at += step) found.push(at);
  return found;
}

class Panel {
  constructor(view, title, height) {
    this.view = view; this.height = height; this.title = title;
    this.readout = element("output", {});
    this.svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", tabindex: "0", "aria-label": title });
    this.table = element("details", {}, element("summary", {}, `${title} as a table`));
    this.table.addEventListener("toggle", () => this.table.open && this.fillTable());
    this.figure = element("figure", {}, element("figcaption", {}, element("span", {}, title), this.readout), this.svg, this.table);
    this.listen();
    view.addEventListener("cursor", () => this.drawCursor());
  }
  listen() {
    let from = null;
    const place = (event) => {
      const box = this.svg.getBoundingClientRect();
      return this.view.at((event.clientX - box.left) / box.width * WIDTH);
    };
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.pointed = (event.clientY - box.top) / box.height * this.height;
      this.view.point(place(event));
      if (from !== null) this.drawSelection(from, place(event));
    });
    this.svg.addEventListener("pointerleave", () => { if (from === null) this.view.point(null); });
    this.svg.addEventListener("pointerdown", (event) => { from = place(event); });
    this.svg.addEventListener("pointerup", (event) => {
      const to = place(event), begin = from; from = null;
      this.selection?.remove();
      if (begin !== null && Math.abs(this.view.x(to) - this.view.x(begin)) > 6) this.view.zoom(Math.min(begin, to), Math.max(begin, to));
    });
    this.svg.addEventListener("dblclick", () => this.view.reset());
    this.svg.addEventListener("keydown", (event) => this.press(event));
  }
  press(event) {
    const view = this.view, width = view.end - view.begin, at = view.cursor ?? (view.begin + view.end) / 2;
    const moves = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1 };
    if (event.key in moves) view.point(Math.min(view.end, Math.max(view.begin, at + moves[event.key] * width)));
    else if (event.key === "+" || event.key === "=") view.zoom(at - width / 4, at + width / 4);
    else if (event.key === "-") view.zoom(at - width, at + width);
    else if (event.key === "Escape" || event.key === "0") view.reset();
    else if (this.names && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      const rows = this.names.length, row = Math.floor(((this.pointed ?? -1) - 18) / this.lane) + (event.key === "ArrowDown" ? 1 : -1);
      this.pointed = 18 + (Math.min(rows - 1, Math.max(0, row)) + 0.5) * this.lane;
      view.point(at);
    }
    else return;
    event.preventDefault();
  }
  drawSelection(from, to) {
    this.selection?.remove();
    const [left, right] = [from, to].map((at) => this.view.x(at)).sort((a, b) => a - b);
    this.selection = shape("rect", { class: "select", x: left, y: 0, width: right - left, height: this.height - BOTTOM });
    this.svg.append(this.selection);
  }
  drawCursor() {
    this.line?.remove();
    const at = this.view.cursor;
    if (at === null) { this.readout.value = ""; return; }
    const x = this.view.x(at);
    this.line = shape("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: this.height - BOTTOM });
    this.svg.append(this.line);
    this.readout.value = this.describe(at);
  }
  // Not while the focus is in it: a button would be taken away from who is about to press it.
  refillTable() {
    if (this.table.open && !this.table.querySelector("div")?.contains(document.activeElement)) this.fillTable();
  }
  drawTime() {
    const bottom = this.height - BOTTOM;
    this.svg.append(shape("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom }));
    const unit = this.view.end - this.view.begin < 6 ? (at) => `${at.toFixed(1)} s` : this.view.end < 90 ? (at) => `${Math.round(at)} s` : (at) => (at < 10 ? `0:0${Math.round(at)}` : duration(at));
    for (const at of timeTicks(this.view.begin, this.view.end, WIDTH > 600 ? 7 : 4)) {
      const x = this.view.x(at);
      this.svg.append(shape("text", { x, y: this.height - 6, "text-anchor": "middle" }, unit(at)));
    }
  }
  drawMarks(marks) {
    const shown = marks.filter((mark) => mark.at >= this.view.begin && mark.at <= this.view.end);
    const isMany = shown.filter((mark) => !UNLINED.has(mark.kind)).length > MANY;  // the curves are seen through the lines
    for (const mark of shown.filter((mark) => !UNLINED.has(mark.kind))) {
      const x = this.view.x(mark.at);
      this.svg.append(shape("line", { class: `mark ${mark.kind}${isMany ? " faint" : ""}`, x1: x, x2: x, y1: 0, y2: this.height - BOTTOM }));
    }
    if (!this.showsSigns) return;
    // Where there is no room for all signs, a loss is shown rather than a checkpoint or a warning.
    const taken = new Set();
    for (const mark of [...shown].sort((one, other) => SHOWN_FIRST.indexOf(other.kind) - SHOWN_FIRST.indexOf(one.kind))) {
      const x = this.view.x(mark.at), cell = Math.round(x / 5);
      if (taken.has(cell - 1) || taken.has(cell) || taken.has(cell + 1)) continue;
      taken.add(cell);
      const sign = shape("text", { class: `sign ${mark.kind}`, x, y: 12 }, SIGNS[mark.kind] ?? "·");
      sign.append(shape("title", {}, mark.text));
      if (this.onMark) { sign.classList.add("opens"); sign.addEventListener("click", () => this.onMark(mark)); }
      this.svg.append(sign);
    }
  }
}

// Where a curve is broken off: no line across a time in which nothing was measured, such as a loss or a pause.
function segmentsOf(xs, span, least) {
  const steps = xs.slice(1).map((x, place) => x - xs[place]).sort((a, b) => a - b);
  const most = Math.max(12 * (steps[Math.floor(steps.length / 2)] ?? 0), span / 50, least), found = [];
  xs.forEach((x, place) => (place && x - xs[place - 1] <= most ? found.at(-1).push(place) : found.push([place])));
  return found;
}

// Curves: `series` is a list of { name, x, low, high }.
export class CurveChart extends Panel {
  constructor(view, title, height = 120, format = number) {
    super(view, title, height); this.series = []; this.showsSigns = false; this.format = format;
    this.every = 0;  // seconds between two measurements
    this.legend = element("p", { className: "soft legend" });
    this.svg.after(this.legend);
  }
  draw(series, marks = []) {
    // A curve keeps its stroke where others have no points.
    this.series = series.map((each, index) => ({ ...each, index })).filter((each) => each.x.length);
    this.legend.replaceChildren(...(series.length > 1 ? this.series.map((each) => element("span", {}, strokeOf(each.index), ` ${each.name} `)) : []));
    this.svg.replaceChildren();
    const values = this.series.flatMap((each) => [...each.low, ...each.high]);
    let low = Math.min(...values), high = Math.max(...values);
    if (!values.length) { low = 0; high = 1; }
    if (this.isFromZero) low = Math.min(low, 0);
    if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
    if (this.format === shortPercent) { low = Math.max(low, 0); high = Math.min(high, 1); }
    const bottom = this.height - BOTTOM;
    const isLog = this.title.endsWith("loss") && low > 0 && high > 100 * low, raw = isLog ? Math.log10 : (value) => value;
    const y = (value) => TOP + (raw(high) - raw(value)) / (raw(high) - raw(low)) * (bottom - TOP);
    for (const value of isLog ? powers(low, high) : ticks(low, high, this.height > 150 ? 4 : 3)) {
      this.svg.append(shape("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
      this.svg.append(shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.format(value, 3)));
    }
    this.drawTime();
    this.drawMarks(marks);
    this.series.forEach((each) => {
      const index = each.index;
      const xs = each.x.map((at) => this.view.x(at).toFixed(1));
      const upper = xs.map((x, place) => `${x},${y(each.high[place]).toFixed(1)}`);
      const lower = xs.map((x, place) => `${x},${y(each.low[place]).toFixed(1)}`);
      const middle = xs.map((x, place) => `${x},${y((each.low[place] + each.high[place]) / 2).toFixed(1)}`);
      for (const segment of segmentsOf(each.x, this.view.end - this.view.begin, this.every * 3)) {
        const of = (points) => segment.map((place) => points[place]);
        this.svg.append(shape("polygon", { class: `spread f${index % 6}`, points: [...of(upper), ...of(lower).reverse()].join(" ") }));
        this.svg.append(shape("polyline", { class: `curve c${index % 6}`, points: of(middle).join(" ") }));
        if (segment.length === 1) this.svg.append(shape("circle", { class: `f${index % 6}`, cx: xs[segment[0]], cy: y(each.high[segment[0]]), r: xs.length === 1 ? 3 : 1.5 }));
      }
    });
    this.drawCursor();
    this.refillTable();
  }
  describe(at) {
    const found = this.series.map((each) => {
      let best = 0;
      each.x.forEach((x, place) => { if (Math.abs(x - at) < Math.abs(each.x[best] - at)) best = place; });
      const [low, high] = [each.low[best], each.high[best]];
      const value = low === high ? this.format(high) : `${this.format(low)} … ${this.format(high)}`;
      return this.series.length > 1 ? `${each.name}: ${value}` : value;
    });
    return `${duration(at)}  ${found.join("   ")}`;
  }
  fillTable() {
    const rows = [];
    for (const each of this.series) {
      const step = Math.max(1, Math.ceil(each.x.length / 40));
      for (let place = 0; place < each.x.length; place += step) {
        rows.push(element("tr", {}, element("td", {}, each.name), element("td", { className: "number" }, duration(each.x[place])),
          element("td", { className: "number" }, this.format(each.low[place])), element("td", { className: "number" }, this.format(each.high[place]))));
      }
    }
    const head = element("tr", {}, ...["curve", "time", "lowest", "highest"].map((each, place) => element("th", { scope: "col", className: place ? "number" : "" }, each)));
    const table = element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `${this.title}, table` }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    this.table.replaceChildren(this.table.firstChild, table);
  }
}

export const PHASES = ["data", "compute", "exchange", "wait", "evaluate", "save"];
const MANY = 50;  // members, beyond which lanes are rows of a heat map; marks, beyond which their lines are faint
const SHOWN_FIRST = ["warning", "checkpoint", "generation", "end", "left", "rejoined", "recovery", "resumed", "scale", "fault", "lost"];  // the last first
const UNLINED = new Set(["checkpoint", "warning"]);
const ROLES = ["worker", "client", "server", "evaluator"];
const placeOf = (name) => { const found = ROLES.findIndex((role) => name.startsWith(role)); return found < 0 ? ROLES.length : found; };
export const byRole = (one, other) => placeOf(one) - placeOf(other) || one.localeCompare(other, "en", { numeric: true });
const PREPARING = { starting: 1, loading: 1, joining: 1 }, DOWN = new Set(["frozen", "lost"]);

// A lane for each member: in each column the shares of the phases, or that it was down; marks with their signs above.
export class LaneChart extends Panel {
  constructor(view, title) {
    super(view, title, 60); this.members = {}; this.marks = []; this.spent = {}; this.showsSigns = true;
    this.legend = element("p", { className: "soft legend" });
    this.svg.after(this.legend);
  }
  // `spent` is of the part of time that is shown: for each member the percentages of the phases, a list of columns each.
  draw(members, marks, spent = {}) {
    this.members = members; this.marks = marks; this.spent = spent;
    const busy = (name) => sum(PHASES.slice(0, 2).flatMap((phase) => spent[name]?.[phase] ?? []));
    let names = Object.keys(members).sort(byRole);
    const isMany = names.length > MANY, lane = isMany ? 5 : 28;
    if (isMany) names = names.map((name) => [busy(name), name]).sort(([one], [other]) => other - one).map(([, name]) => name);
    this.names = names; this.lane = lane;
    this.drawLegend(isMany);
    this.height = 18 + Math.max(1, names.length) * lane + BOTTOM + 4;
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${this.height}`);
    this.svg.replaceChildren();
    names.forEach((name, row) => {
      const top = 18 + row * lane;
      if (!isMany) this.svg.append(shape("text", { x: LEFT - 6, y: top + 18, "text-anchor": "end" }, name.replace("worker ", WIDTH > 600 ? "worker " : "w ")));
      const hasPhases = spent[name] && PHASES.some((phase) => sum(spent[name][phase]));
      if (hasPhases && !isMany) this.drawUp(members[name], top + 1, lane - 2);
      if (hasPhases) (isMany ? this.drawHeat : this.drawPhases).call(this, spent[name], top + 1, lane - 2);
      for (const span of members[name]) {
        if (span.state === "up" && (hasPhases || members[name].some((each) => each.state in PREPARING))) continue;
        const left = Math.max(this.view.x(span.begin), LEFT), right = Math.min(this.view.x(span.end ?? this.view.full), WIDTH - RIGHT);
        if (right <= left - 1) continue;
        const bar = shape("rect", { class: span.state, x: left, y: top + 1, width: Math.max(1, right - left), height: lane - 2 });
        bar.append(shape("title", {}, `${name}: ${span.state} from ${duration(span.begin)}${span.end === null ? "" : ` to ${duration(span.end)}`}`));
        this.svg.append(bar);
        if (!isMany && span.state !== "up" && right - left > 7 * span.state.length) this.svg.append(shape("text", { class: "state-name", x: (left + right) / 2, y: top + 18, "text-anchor": "middle" }, span.state));
      }
    });
    this.drawTime();
    this.drawMarks(marks);
    this.drawCursor();
    this.refillTable();
  }
  // Behind the phases: what a process recorded last before it was killed is not known.
  drawUp(spans, top, height) {
    for (const { state, begin, end } of spans) {
      const left = Math.max(this.view.x(begin), LEFT), right = Math.min(this.view.x(end ?? this.view.full), WIDTH - RIGHT);
      if (state === "up" && right > left) this.svg.append(shape("rect", { class: "up", x: left, y: top, width: right - left, height }));
    }
  }
  drawLegend(isMany) {
    const key = (style, text) => element("span", {}, element("i", { className: `key ${style}` }), ` ${text} `);
    const states = new Set(Object.values(this.members).flatMap((spans) => spans.map((span) => span.state)));
    const others = [];
    if ([...states].some((state) => state in PREPARING)) others.push(key("kpreparing", "starting, loading, joining"));
    if (states.has("frozen")) others.push(key("kfrozen", "frozen"));
    if (states.has("lost")) others.push(key("klost", "lost"));
    if (!Object.keys(this.spent).length) this.legend.replaceChildren(key("kup", "up"), ...others);
    else if (isMany) this.legend.replaceChildren(...[1, 2, 3, 4].map((level) => key(`kheat${level}`, `${25 * (level - 1)} – ${25 * level} % busy`)), ...others, ` (data and compute; the busiest, for which others wait, first: ${this.names.slice(0, 3).join(", ")})`);
    else this.legend.replaceChildren(...PHASES.map((name, place) => key(`k${place}`, name)), key("kup", "up, nothing recorded"), ...others, " (from the bottom to the top of a lane)");
  }
  // One path for each phase: a column is stacked from the bottom.
  drawPhases(spent, top, height) {
    const count = spent[PHASES[0]].length, width = (WIDTH - LEFT - RIGHT) / count, below = new Array(count).fill(0);
    PHASES.forEach((phase, place) => {
      let path = "";
      spent[phase].forEach((share, column) => {
        const part = Math.min(share, 100 - below[column]) * height / 100;
        if (part <= 0) return;
        const y = top + height - below[column] * height / 100 - part;
        below[column] += Math.min(share, 100 - below[column]);
        path += `M${(LEFT + column * width).toFixed(1)} ${y.toFixed(1)}h${(width + 0.1).toFixed(2)}v${part.toFixed(1)}h-${(width + 0.1).toFixed(2)}z`;
      });
      if (path) this.svg.append(shape("path", { class: `f${place}`, d: path }));
    });
  }
  drawHeat(spent, top, height) {
    const paths = ["", "", "", ""], count = spent.compute.length, width = (WIDTH - LEFT - RIGHT) / count;
    for (let column = 0; column < count; column += 1) {
      if (!PHASES.some((phase) => spent[phase][column])) continue;
      const level = Math.min(3, Math.floor((spent.data[column] + spent.compute[column]) / 25));
      paths[level] += `M${(LEFT + column * width).toFixed(1)} ${top}h${(width + 0.1).toFixed(2)}v${height}h-${(width + 0.1).toFixed(2)}z`;
    }
    paths.forEach((path, level) => { if (path) this.svg.append(shape("path", { class: `heat${level + 1}`, d: path })); });
  }
  describe(at) {
    const row = Math.floor((this.pointed - 18) / this.lane), name = this.names?.[row], spent = this.spent[name];
    let doing = [];
    if (spent) {
      const column = Math.min(spent.compute.length - 1, Math.max(0, Math.floor((at - this.view.begin) / (this.view.end - this.view.begin) * spent.compute.length)));
      doing = [`${name}: ${PHASES.filter((phase) => spent[phase][column]).map((phase) => `${phase} ${spent[phase][column]} %`).join(", ") || "nothing recorded"}`];
    }
    const down = Object.entries(this.members).filter(([, spans]) => spans.some((span) => DOWN.has(span.state) && span.begin <= at && (span.end ?? Infinity) > at));
    const near = this.marks.filter((mark) => Math.abs(this.view.x(mark.at) - this.view.x(at)) < 6).slice(0, 2).map((mark) => mark.text);
    return [duration(at), down.length ? `down: ${down.map(([name]) => name).join(", ")}` : "none lost", ...doing, ...near].join("   ").slice(0, 160);
  }
  fillTable() {
    const rows = this.marks.slice(-200).reverse().map((mark) => element("tr", {}, element("td", { className: "number" }, duration(mark.at)),
      element("td", {}, mark.kind), element("td", { className: "number" }, mark.step ?? ""), element("td", {}, mark.text),
      element("td", {}, this.onMark ? element("button", { type: "button", className: "link", ariaLabel: `logs at ${duration(mark.at)}`, onclick: () => this.onMark(mark) }, "logs") : "")));
    const head = element("tr", {}, ...["time", "what", "step", "details", "logs"].map((each, place) => element("th", { scope: "col", className: place === 0 || place === 2 ? "number" : "" }, each)));
    const table = element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `${this.title}, table` }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    this.table.replaceChildren(this.table.firstChild, table);
  }
}

// Points by a number, by its powers where they span much, or by a name; `line` is a list of [x, y] that is drawn as steps.
export function scatter(title, points, { line = [], xName = "", format = number, height = 220 } = {}) {
  const names = points.some((point) => typeof point.x !== "number") ? [...new Set(points.map((point) => String(point.x)))].sort() : null;
  const values = [...points.map((point) => point.x), ...line.map(([x]) => x)];
  const isLog = !names && values.length > 1 && Math.min(...values) > 0 && Math.max(...values) > 50 * Math.min(...values) && xName !== "trial";
  const raw = names ? (x) => names.indexOf(String(x)) : isLog ? Math.log10 : (x) => x;
  const span = (list) => { const low = Math.min(...list), high = Math.max(...list); return low === high ? [low - 0.5, high + 0.5] : [low - (high - low) * 0.04, high + (high - low) * 0.04]; };
  const [left, right] = names ? [-0.5, names.length - 0.5] : span(values.length ? values.map(raw) : [0, 1]);
  const heights = [...points.map((point) => point.y), ...line.map(([, y]) => y)];
  const [low, high] = span(heights.length ? heights : [0, 1]);
  const bottom = height - BOTTOM, place = (x) => LEFT + (raw(x) - left) / (right - left) * (WIDTH - LEFT - RIGHT), y = (value) => TOP + (high - value) / (high - low) * (bottom - TOP);
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}; the table of trials has the values` });
  for (const value of ticks(low, high, 4)) {
    svg.append(shape("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }), shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value, 3)));
  }
  const marks = names ?? (isLog ? ticks(Math.ceil(left), Math.floor(right), 4).map((power) => 10 ** Math.round(power)) : ticks(left, right, WIDTH > 600 ? 8 : 4));
  for (const x of new Set(marks)) if (place(x) <= WIDTH - RIGHT && place(x) >= LEFT) svg.append(shape("text", { x: place(x), y: height - 6, "text-anchor": "middle" }, names ? x : number(x, 3)));
  if (line.length) {
    const path = line.flatMap(([x, value], index) => (index ? [`${place(x).toFixed(1)},${y(line[index - 1][1]).toFixed(1)}`] : []).concat(`${place(x).toFixed(1)},${y(value).toFixed(1)}`));
    svg.append(shape("polyline", { class: "curve c2", points: path.join(" ") }));
  }
  for (const point of points) {
    const sign = shape("text", { class: `point ${point.style}`, x: place(point.x), y: y(point.y) + 4 }, point.sign);
    sign.append(shape("title", {}, point.text));
    svg.append(sign);
  }
  return element("figure", {}, element("figcaption", {}, element("span", {}, title)), svg);
}

export const COLUMNS = WIDTH - LEFT - RIGHT;
