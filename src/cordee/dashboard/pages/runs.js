// The list of runs; those that are ticked are compared.

import { CurveChart, View, COLUMNS } from "./chart.js";
import { ask, duration, element, moment, percent } from "./format.js";

export async function showRuns(main) {
  const ticked = new Set();
  const compared = element("section", { ariaLabel: "Comparison" });
  const body = element("tbody");
  const button = element("button", { type: "button", disabled: true, onclick: () => compare([...ticked], compared) }, "Compare");
  const heads = [["", ""], ["run", ""], ["state", ""], ["strategy", "wide"], ["workers", "number wide"], ["steps", "number"], ["accuracy", "number"], ["time", "number wide"], ["started", "wide"]];
  const head = element("tr", {}, ...heads.map(([text, style]) => element("th", { scope: "col", className: style }, text || element("span", { ariaLabel: "tick to compare" }, "✓"))));
  const table = element("table", {}, element("thead", {}, head), body);
  main.replaceChildren(element("h1", {}, "Runs"), element("div", { className: "row" }, button, element("span", { className: "soft" }, "Tick two or more to compare their curves.")),
    element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Runs" }, table), compared);
  const refresh = async () => {
    const runs = await ask("/api/runs");
    body.replaceChildren(...runs.map((run) => row(run, ticked, button)));
    if (!runs.length) body.replaceChildren(element("tr", {}, element("td", { colSpan: 9 }, "No runs yet: cordee train JOB.toml makes one.")));
  };
  await refresh();
  const timer = setInterval(() => refresh().catch(() => {}), 5000);
  return () => clearInterval(timer);
}

function row(run, ticked, button) {
  const tick = element("input", { type: "checkbox", checked: ticked.has(run.path), ariaLabel: `compare ${run.path}`, onchange: (event) => {
    event.target.checked ? ticked.add(run.path) : ticked.delete(run.path);
    button.disabled = ticked.size < 2;
  } });
  const link = element("a", { href: `/run/${encodeURIComponent(run.path)}` }, run.path);
  const cell = (text, style = "") => element("td", { className: style }, text);
  return element("tr", {}, element("td", {}, tick), element("td", {}, link, run.problem ? element("div", { className: "error" }, run.problem) : null),
    element("td", { className: `state ${run.state}` }, run.state), cell(run.strategy ?? "–", "wide"), cell(run.workers ?? "–", "number wide"),
    cell(run.steps === null ? "–" : run.steps.toLocaleString("en"), "number"), cell(percent(run.test_accuracy), "number"), cell(duration(run.wall_seconds), "number wide"), cell(moment(run.started), "wide"));
}

async function compare(names, place) {
  const overviews = await Promise.all(names.map((name) => ask(`/api/run/${encodeURIComponent(name)}`)));
  const view = new View();
  view.setFull(Math.max(...overviews.map((each) => each.end)));
  const kinds = { accuracy: "Test accuracy", loss: "Training loss", rate: "Samples per second" };
  const charts = Object.fromEntries(Object.entries(kinds).map(([key, title]) => [key, new CurveChart(view, title)]));
  const draw = async () => {
    const all = await Promise.all(names.map((name) => ask(`/api/run/${encodeURIComponent(name)}/series?begin=${view.begin}&end=${view.end}&columns=${COLUMNS}`)));
    for (const [key, chart] of Object.entries(charts)) chart.draw(all.map((each, place) => ({ name: names[place], ...each.curves[key] })));
  };
  view.addEventListener("zoom", draw);
  const legend = element("ul", {}, ...names.map((name, place) => {
    const final = overviews[place].rows.find(([label]) => label === "test");
    return element("li", {}, `${place + 1}. ${name} (${["solid", "dashed", "dotted", "dash-dot", "fine dots", "long dashes"][place % 6]}): ${overviews[place].step.toLocaleString("en")} steps, ${duration(overviews[place].end)}${final ? `, ${final[1]}` : ""}`);
  }));
  place.replaceChildren(element("h2", {}, "Comparison"), legend, ...Object.values(charts).map((chart) => chart.figure));
  await draw();
}

