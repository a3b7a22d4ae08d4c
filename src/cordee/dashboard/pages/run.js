// One run on one screen, which follows the run as long as it lasts.

import { COLUMNS, CurveChart, LaneChart, View } from "./chart.js";
import { predictionOf, sharesOf, stalenessOf } from "./breakdown.js";
import { ask, element } from "./format.js";

export async function showRun(main, name) {
  const path = `/api/run/${encodeURIComponent(name)}`;
  const view = new View();
  const state = element("span", { className: "state" });
  const bar = element("progress", { ariaLabel: "steps taken" });
  const diagnosis = element("p", { className: "diagnosis", role: "status" });
  const facts = element("dl", { className: "facts" });
  const lanes = new LaneChart(view, "Members");
  const charts = { loss: new CurveChart(view, "Training loss"), accuracy: new CurveChart(view, "Test accuracy"), test_loss: new CurveChart(view, "Test loss"), rate: new CurveChart(view, "Samples per second") };
  const reset = element("button", { type: "button", onclick: () => view.reset() }, "Show all");
  const help = element("span", { className: "soft" }, "Drag to zoom; with a chart in focus: arrows move the cursor, + and − zoom, Escape shows all.");
  const whole = element("div", {});
  main.replaceChildren(element("h1", {}, name, " ", state), bar, diagnosis, facts, element("div", { className: "row" }, reset, help),
    lanes.figure, ...Object.values(charts).map((chart) => chart.figure), whole, logsOf(path), jobOf(path));
  let overview = null;
  const drawCurves = async () => {
    const series = await ask(`${path}/series?begin=${view.begin}&end=${view.end}&columns=${COLUMNS}`);
    const shown = overview.marks.filter((mark) => mark.kind !== "warning" && mark.kind !== "checkpoint");
    for (const [key, chart] of Object.entries(charts)) {
      chart.figure.hidden = !(key in overview.curves);
      chart.draw([{ name: chart.title, ...series.curves[key] }], shown);
    }
    lanes.draw(overview.members, overview.marks);
  };
  const refresh = async () => {
    overview = await ask(path);
    view.setFull(overview.end);
    state.textContent = overview.state;
    state.className = `state ${overview.state}`;
    bar.hidden = !overview.total_steps;
    if (overview.total_steps) { bar.max = overview.total_steps; bar.value = overview.step; }
    diagnosis.textContent = overview.is_behind ? "Reading the events of this run …" : overview.diagnosis;
    facts.replaceChildren(...overview.rows.filter(([label]) => label !== "run").map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, value))));
    // Not while a table of it is open: it would close.
    if (!whole.querySelector("details[open]")) whole.replaceChildren(...[sharesOf(overview.phases), stalenessOf(overview.staleness), predictionOf(overview.facts)].filter((each) => each));
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
  const stream = new EventSource(`${path}/stream?offset=${overview.offset}`);
  stream.onmessage = (message) => { const news = JSON.parse(message.data); if (news.offset !== overview.offset || news.state !== overview.state) catchUp(); };
  return () => stream.close();
}

function logsOf(path) {
  const text = element("pre", { tabIndex: 0, ariaLabel: "logs" });
  const details = element("details", {}, element("summary", {}, "Logs of all members, by time"), text);
  details.addEventListener("toggle", async () => {
    if (!details.open) return;
    try {
      const lines = await ask(`${path}/logs`);
      text.textContent = lines.map(([member, line]) => `${member.padEnd(12)} | ${line}`).join("\n") || "no logs yet";
    } catch (problem) { text.textContent = problem.message; }
  });
  return element("section", {}, element("h2", {}, "Logs"), details);
}

function jobOf(path) {
  const text = element("pre", { tabIndex: 0, ariaLabel: "job file" });
  const details = element("details", {}, element("summary", {}, "job.toml, as resolved"), text);
  details.addEventListener("toggle", async () => {
    if (details.open) text.textContent = await ask(`${path}/job`).catch((problem) => problem.message);
  });
  return element("section", {}, element("h2", {}, "Job"), details);
}
