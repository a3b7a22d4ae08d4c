// A comparison of runs in a page of its own, with the data inside of it.

import { CurveChart, View } from "./chart.js";
import { duration, element, number, percent, shortPercent } from "./format.js";

const STROKES = ["solid", "dashed", "dotted", "dash-dot", "fine dots", "long dashes"];
const comparison = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("main");

const columns = [
  ["run", (run) => run.run], ["strategy", (run) => `${run.strategy} × ${run.workers}`], ["state", (run) => run.status],
  [comparison.target ? `time to ${percent(comparison.target)}` : "time to accuracy", (run) => duration(run.seconds_to_target)],
  ["samples/s", (run) => number(run.samples_per_second, 3)], ["test accuracy", (run) => percent(run.test_accuracy)], ["test loss", (run) => number(run.test_loss)],
  ["time", (run) => duration(run.seconds)], ["step", (run) => (run.step_seconds ? `${number(1000 * run.step_seconds, 3)} ms` : "–")],
  ["predicted", (run) => (run.predicted_step_seconds ? `${number(1000 * run.predicted_step_seconds, 3)} ms` : "–")],
  ["memory", (run) => (run.peak_memory_bytes ? `${number(run.peak_memory_bytes / 1e6, 3)} MB` : "–")],
  ["recoveries", (run) => run.recoveries], ["weights", (run) => (run.weights_sha256 ?? "–").slice(0, 12)],
];
const rows = comparison.runs.map((run) => element("tr", {}, ...columns.map(([, cell], place) => element("td", { className: place > 2 ? "number" : "" }, String(cell(run))))));
const head = element("tr", {}, ...columns.map(([title], place) => element("th", { scope: "col", className: place > 2 ? "number" : "" }, title)));
page.append(element("h2", {}, "Verdict"), element("ul", {}, ...comparison.verdict.map((line) => element("li", {}, line))),
  element("h2", {}, "Figures"), element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Figures" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))),
  element("h2", {}, "Curves, by the time since the first step"), element("ul", {}, ...comparison.runs.map((run, place) => element("li", {}, `${run.run}: ${STROKES[place % 6]}`))));

const view = new View();
const titles = { accuracy: "Test accuracy", loss: "Training loss", test_loss: "Test loss", rate: "Samples per second" };
const series = (key) => comparison.runs.map((run) => ({ name: run.run, x: [], low: [], high: [], ...comparison.curves[run.run][key] }));
view.setFull(Math.max(...Object.values(comparison.curves).flatMap((each) => Object.values(each)).map((curve) => curve.x.at(-1) ?? 0)));
const charts = Object.entries(titles).filter(([key]) => series(key).some((each) => each.x.length)).map(([key, title]) => [key, new CurveChart(view, title, 190, key === "accuracy" ? shortPercent : number)]);
const inside = (each) => {
  const kept = each.x.map((at, place) => place).filter((place) => each.x[place] >= view.begin && each.x[place] <= view.end);
  return { name: each.name, x: kept.map((place) => each.x[place]), low: kept.map((place) => each.low[place]), high: kept.map((place) => each.high[place]) };
};
const draw = () => charts.forEach(([key, chart]) => chart.draw(series(key).map(inside)));
view.addEventListener("zoom", draw);
page.append(...charts.map(([, chart]) => chart.figure));
draw();
