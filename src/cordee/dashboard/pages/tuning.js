// The trials of a search in a page of its own, with the data inside of it.

import { scatter, shape } from "./chart.js";
import { duration, element, number, percent, shortPercent } from "./format.js";

const results = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("main");
const STATE_SIGNS = { completed: "●", pruned: "✕", failed: "▼" };
const show = (value) => (results.metric.endsWith("accuracy") ? percent(value) : number(value));
const onAxis = results.metric.endsWith("accuracy") ? shortPercent : number;
const keys = [...new Set(results.trials.flatMap((trial) => Object.keys(trial.point)))];
const named = (trial) => keys.map((key) => `${key} = ${typeof trial.point[key] === "number" ? number(trial.point[key]) : trial.point[key]}`).join(", ");
const completed = results.trials.filter((trial) => trial.state === "completed" && trial.value !== null);
const ranked = [...completed].sort((one, other) => (results.is_maximized ? other.value - one.value : one.value - other.value));
const count = (state) => results.trials.filter((trial) => trial.state === state).length;

const lines = [`${results.trials.length} trials: ${count("completed")} completed, ${count("pruned")} pruned, ${count("failed")} failed.`];
if (ranked.length) lines.unshift(`Best: trial ${ranked[0].number} with ${results.metric} ${show(ranked[0].value)}, ${named(ranked[0])}.`);
if (Object.keys(results.importances).length) lines.push("Importance is the share of the spread of the completed trials that a key explains (fANOVA). It says nothing of values outside of the search.");
lines.push("The test set has chosen the best trial: measure its model on samples that no trial has seen.");
page.append(element("h2", {}, "Result"), element("ul", {}, ...lines.map((line) => element("li", {}, line))));

const points = (x) => results.trials.filter((trial) => trial.value !== null && x(trial) !== undefined)
  .map((trial) => ({ x: x(trial), y: trial.value, sign: STATE_SIGNS[trial.state], style: trial.state, text: `trial ${trial.number}, ${trial.state}: ${results.metric} ${show(trial.value)}, ${named(trial)}` }));
const legend = element("p", { className: "soft legend" }, ...Object.entries(STATE_SIGNS).map(([state, sign]) => element("span", {}, `${sign} ${state} `)), element("span", {}, "line: the best so far"));
const best = results.trials.map((trial, place) => [trial.number, results.best[place]]).filter(([, value]) => value !== null);
page.append(element("h2", {}, "History"), legend, scatter(`${results.metric} by trial`, points((trial) => trial.number), { line: best, xName: "trial", format: onAxis }));

page.append(element("h2", {}, "Importance"));
const shares = Object.entries(results.importances);
if (shares.length) {
  const height = 26 * shares.length + 8;
  const bars = shape("svg", { class: "chart bars", viewBox: `0 0 600 ${height}`, role: "img", "aria-label": `Importance: ${shares.map(([key, share]) => `${key} ${percent(share)}`).join(", ")}` });
  shares.forEach(([key, share], row) => {
    bars.append(shape("text", { x: 190, y: 26 * row + 20, "text-anchor": "end" }, key), shape("rect", { class: "f0", x: 198, y: 26 * row + 6, width: Math.max(1, 330 * share), height: 18 }),
      shape("text", { x: 204 + 330 * share, y: 26 * row + 20 }, percent(share)));
  });
  page.append(bars);
} else page.append(element("p", { className: "soft" }, "Too few trials were completed to tell."));

page.append(element("h2", {}, "Values"));
for (const key of keys) page.append(scatter(`${results.metric} by ${key}`, points((trial) => trial.point[key]), { xName: key, format: onAxis }));

const heads = ["trial", "state", results.metric, ...keys, "evaluations", "time"];
const cell = (value) => (typeof value === "number" ? number(value) : String(value ?? "–"));
const rows = results.trials.map((trial) => element("tr", {}, element("td", {}, String(trial.number)), element("td", {}, trial.state + (trial.error ? `: ${trial.error}` : "")), element("td", { className: "number" }, show(trial.value)),
  ...keys.map((key) => element("td", { className: "number" }, cell(trial.point[key]))), element("td", { className: "number" }, String(trial.evaluations)), element("td", { className: "number" }, duration(trial.seconds))));
page.append(element("h2", {}, "Trials"), element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Trials" },
  element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head, place) => element("th", { scope: "col", className: place > 1 ? "number" : "" }, head)))), element("tbody", {}, ...rows))));
