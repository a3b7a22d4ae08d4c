// One run on one screen, which follows the run as long as it lasts.

import { byRole, COLUMNS, CurveChart, LaneChart, View } from "./chart.js";
import { linksOf, passesOf, predictionOf, roundsOf, sharesOf, stalenessOf } from "./breakdown.js";
import { ask, duration, element, shortPercent } from "./format.js";

const MOST_LOG_LINES = 2000;  // of an answer
const LOGS_EVERY_MS = 3000;  // they are read from the files of all members

export async function showRun(main, name) {
  const path = `/api/run/${encodeURIComponent(name)}`;
  let overview = null;
  const view = new View();
  const state = element("span", { className: "state" });
  const bar = element("progress", { ariaLabel: "steps taken" });
  const diagnosis = element("p", { className: "diagnosis", role: "status" });
  const facts = element("dl", { className: "facts" });
  const lanes = new LaneChart(view, "Members");
  const charts = { loss: new CurveChart(view, "Training loss"), accuracy: new CurveChart(view, "Test accuracy", 120, shortPercent), rate: new CurveChart(view, "Samples per second"), test_loss: new CurveChart(view, "Test loss") };
  const used = { cpu: new CurveChart(view, "Processor of each member, cores"), memory: new CurveChart(view, "Memory of each member, MB"), sent: new CurveChart(view, "Sent by each member over sockets, MB/s"), age: new CurveChart(view, "Staleness of the gradients of each worker, updates in the mean") };
  for (const chart of [charts.rate, ...Object.values(used)]) chart.isFromZero = true;
  for (const chart of Object.values(used)) chart.every = 1;  // members write once a second
  const reset = element("button", { type: "button", onclick: () => view.reset() }, "Show all");
  const help = element("span", { className: "soft" }, "Drag to zoom; with a chart in focus: arrows move the cursor, + and − zoom, Escape shows all.");
  const whole = element("div", {}), logs = logsOf(path, () => overview.marks);
  lanes.onMark = (mark) => logs.showAt(mark.at);
  main.replaceChildren(element("h1", {}, name, " ", state), bar, diagnosis, facts, element("div", { className: "row" }, reset, help),
    lanes.figure, ...Object.values(charts).map((chart) => chart.figure), used.age.figure, whole, used.cpu.figure, used.memory.figure, used.sent.figure, logs.section, jobOf(path));
  const drawCurves = async () => {
    const part = `begin=${view.begin}&end=${view.end}`;
    const [series, spent] = await Promise.all([ask(`${path}/series?${part}&columns=${COLUMNS}`), ask(`${path}/lanes?${part}&columns=${Math.ceil(COLUMNS / 3)}`)]);
    const shown = overview.marks.filter((mark) => mark.kind !== "warning" && mark.kind !== "checkpoint");
    for (const [key, chart] of Object.entries(charts)) {
      chart.figure.hidden = !(key in overview.curves);
      chart.draw([{ name: chart.title, ...series.curves[key] }], shown);
    }
    const byMember = spent.members;
    lanes.draw({ ...Object.fromEntries(Object.keys(byMember).map((name) => [name, []])), ...overview.members }, overview.marks, byMember);
    for (const [key, chart] of Object.entries(used)) {
      const series = curvesOf(byMember, key, key === "memory" || key === "sent" ? 1e-6 : 1, (place) => view.begin + (place + 0.5) / spent.columns * (view.end - view.begin));
      chart.figure.hidden = !series.some((each) => each.high.some((value) => value > 0));
      chart.draw(series, shown);
    }
  };
  const refresh = async () => {
    overview = await ask(path);
    view.setFull(overview.end);
    state.textContent = overview.state;
    state.className = `state ${overview.state}`;
    bar.hidden = !overview.total_steps;
    if (overview.total_steps) { bar.max = overview.total_steps; bar.value = overview.step; }
    diagnosis.textContent = overview.is_behind ? "Reading the events of this run …" : overview.diagnosis;
    const more = [];
    if (overview.seconds_left !== null) more.push(["time left", duration(overview.seconds_left)]);
    if (overview.workers && overview.state === "running") more.push(["workers", overview.workers[0] === overview.workers[1] ? String(overview.workers[0]) : `${overview.workers[0]} of ${overview.workers[1]} wanted`]);
    facts.replaceChildren(...more.concat(overview.rows).filter(([label, value]) => label !== "run" && (label !== "state" || value !== overview.state)).map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, value))));
    // Not while a table of it is open: it would close.
    if (!whole.querySelector("details[open]")) {
      const held = whole.contains(document.activeElement) ? document.activeElement.textContent : null;
      whole.replaceChildren(...[sharesOf(overview.phases), passesOf(overview.passes), stalenessOf(overview.staleness), roundsOf(overview.rounds), linksOf(overview.links), predictionOf(overview.facts, overview.predicted, overview.phases)].filter((each) => each));
      if (held) [...whole.querySelectorAll("summary")].find((each) => each.textContent === held)?.focus({ preventScroll: true });
    }
    logs.follow();
    await drawCurves();
  };
  view.addEventListener("zoom", () => drawCurves());
  await refresh();
  let isDue = false, isBusy = false;
  const catchUp = async () => {
    if (isBusy) { isDue = true; return; }
    isBusy = true;
    try { await refresh(); isDue ||= overview.is_behind; } catch (problem) { diagnosis.textContent = String(problem.message); }
    setTimeout(() => { isBusy = false; if (isDue) { isDue = false; catchUp(); } }, overview.is_behind ? 50 : 1000);
  };
  if (overview.is_behind) catchUp();
  const stream = new EventSource(`${path}/stream`);
  stream.onmessage = (message) => { const news = JSON.parse(message.data); if (news.offset !== overview.offset || news.is_running !== (overview.state === "running")) catchUp(); };
  return () => stream.close();
}

// Of up to six members a curve each; of more the lowest and the highest of all.
function curvesOf(members, key, factor, x) {
  const names = Object.keys(members).sort(byRole), has = names.filter((name) => key in members[name]), series = [];
  const add = (name, values) => {
    const places = values.map((each, place) => place).filter((place) => values[place] !== null);
    series.push({ name, x: places.map(x), low: places.map((place) => factor * values[place][0]), high: places.map((place) => factor * values[place][1]) });
  };
  if (names.length <= 6) for (const name of names) add(name, (members[name][key] ?? []).map((value) => (value === null ? null : [value, value])));
  else {
    const all = (members[has[0]]?.[key] ?? []).map((_, place) => has.map((name) => members[name][key][place]).filter((value) => value !== null));
    add(`${has.length} members`, all.map((values) => (values.length ? [Math.min(...values), Math.max(...values)] : null)));
  }
  return series;
}

// The lines of all members by time, with what happened to the run between them; `showAt` goes to a moment of it.
function logsOf(path, marksOf) {
  const list = element("ol", { className: "logs", tabIndex: 0, ariaLabel: "logs" });
  const details = element("details", {}, element("summary", {}, "Logs of all members, by time"), list);
  const fill = async () => {
    try {
      const lines = (await ask(`${path}/logs`)).map(([member, text, at]) => ({ at, text: `${member.padEnd(12)} | ${text}`, style: "" }));
      const begin = lines.length < MOST_LOG_LINES ? -1 : lines[0].at;  // the log is cut at its beginning
      const marks = marksOf().filter((mark) => mark.at >= begin).map((mark) => ({ at: mark.at, text: `${duration(mark.at)}  ${mark.text}`, style: `happened ${mark.kind}` }));
      const all = [...marks, ...lines].sort((one, other) => one.at - other.at);
      list.replaceChildren(...all.map((each) => { const item = element("li", { className: each.style, tabIndex: -1 }, each.text); item.dataset.at = each.at; return item; }));
      if (!all.length) list.replaceChildren(element("li", {}, "no logs yet"));
    } catch (problem) { list.replaceChildren(element("li", { className: "error" }, problem.message)); }
  };
  let isFilled = null, filledAt = 0;
  // What is read stays where it is; who looks at the end sees what is new.
  const follow = async () => {
    const isReading = document.activeElement !== list && list.contains(document.activeElement);
    if (!details.open || isReading || performance.now() - filledAt < LOGS_EVERY_MS) return;
    const isAtEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 4;
    filledAt = performance.now();
    await (isFilled = fill());
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  };
  details.addEventListener("toggle", () => { if (details.open) isFilled ??= fill(); else isFilled = null; });
  const showAt = async (at) => {
    isFilled ??= fill();
    details.open = true;
    await isFilled;
    const items = [...list.children].filter((item) => item.dataset.at !== undefined);
    const item = items.find((each) => Number(each.dataset.at) >= at - 0.0005) ?? items.at(-1);
    item?.scrollIntoView({ block: "center" });
    item?.focus({ preventScroll: true });
  };
  return { section: element("section", {}, element("h2", {}, "Logs"), details), showAt, follow };
}

function jobOf(path) {
  const text = element("pre", { tabIndex: 0, ariaLabel: "job file" });
  const details = element("details", {}, element("summary", {}, "job.toml, as resolved"), text);
  details.addEventListener("toggle", async () => {
    if (details.open) text.textContent = await ask(`${path}/job`).catch((problem) => problem.message);
  });
  return element("section", {}, element("h2", {}, "Job"), details);
}
