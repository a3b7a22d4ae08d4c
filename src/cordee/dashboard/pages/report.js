// A comparison of runs in a page of its own, with the data inside of it.

import { CurveChart, View } from "./chart.js";
import { bytes, duration, element, number, percent, shortPercent } from "./format.js";

const STROKES = ["solid", "dashed", "dotted", "dash-dot", "fine dots", "long dashes"];
const comparison = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("main");

const known = [
  ["run", (run) => run.run], ["strategy", (run) => `${run.strategy} × ${run.workers}`], ["state", (run) => run.status],
  [comparison.target ? `time to ${percent(comparison.target).replace(" ", "\u00a0")}` : "time to accuracy", (run) => duration(run.seconds_to_target)],
  ["samples/s", (run) => number(run.samples_per_second, 3)], ["test accuracy", (run) => percent(run.test_accuracy)], ["test loss", (run) => number(run.test_loss)],
  ["time", (run) => duration(run.seconds)], ["step", (run) => (run.step_seconds ? `${number(1000 * run.step_seconds, 3)} ms` : "–")],
  ["predicted", (run) => (run.predicted_step_seconds ? `${number(1000 * run.predicted_step_seconds, 3)} ms` : "–")],
  ["waiting", (run) => shortPercent(run.idle_share, 2)], ["exchange", (run) => shortPercent(run.exchange_share, 2)],
  ["sent", (run) => bytes(run.bytes_sent)],
  ["memory", (run) => bytes(run.peak_memory_bytes)],
  ["recoveries", (run) => (comparison.runs.some((each) => each.recoveries) ? run.recoveries : "–")],
];
const columns = known.filter(([, cell]) => comparison.runs.some((run) => cell(run) !== "–"));  // what no run has is left out
const rows = comparison.runs.map((run) => element("tr", {}, ...columns.map(([, cell], place) => element("td", { className: place > 2 ? "number" : "" }, String(cell(run))))));
const head = element("tr", {}, ...columns.map(([title], place) => element("th", { scope: "col", className: place > 2 ? "number" : "" }, title)));
page.append(element("h2", {}, "Verdict"), element("ul", {}, ...comparison.verdict.map((line) => element("li", {}, line))),
  element("h2", {}, "Figures"), element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Figures" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))),
  element("h2", {}, "Curves, by the time since training began"), element("ul", {}, ...comparison.runs.map((run, place) => element("li", {}, `${run.run}: ${STROKES[place % 6]}`))));

// Over several seeds: the median, and from where to where the values go.
const groups = [...new Set(comparison.runs.map((run) => run.group))].map((name) => [name, comparison.runs.filter((run) => run.group === name)]);
if (groups.some(([, runs]) => runs.length > 1)) {
  const spread = (runs, key, show) => {
    const values = runs.map((run) => run[key]).filter((value) => value !== null).sort((one, other) => one - other), middle = (values.length - 1) / 2;
    return values.length ? `${show((values[Math.floor(middle)] + values[Math.ceil(middle)]) / 2)} (${show(values[0])} – ${show(values.at(-1))})` : "–";
  };
  const heads = ["strategy or run", "runs", columns[3][0], "samples/s", "test accuracy", "test loss"];
  const lines = groups.map(([name, runs]) => [name, String(runs.length), spread(runs, "seconds_to_target", duration), spread(runs, "samples_per_second", (value) => number(value, 3)), spread(runs, "test_accuracy", percent), spread(runs, "test_loss", number)]);
  const cells = (texts, tag) => element("tr", {}, ...texts.map((text, place) => element(tag, { className: place ? "number" : "" }, text)));
  const seeds = element("section", {}, element("h2", {}, "Spread over the seeds: median, lowest and highest"), element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Spread over the seeds" },
    element("table", {}, element("thead", {}, cells(heads, "th")), element("tbody", {}, ...lines.map((line) => cells(line, "td"))))));
  page.insertBefore(seeds, page.querySelector(".scroll").nextSibling);
}

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
