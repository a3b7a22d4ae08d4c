// The list of runs; those that are ticked are compared.

import { CurveChart, View, COLUMNS, shape } from "./chart.js";
import { ask, duration, element, moment, number, percent, shortPercent } from "./format.js";

export async function showRuns(main) {
  const ticked = new Set();
  const compared = element("section", { ariaLabel: "Comparison" });
  const body = element("tbody");
  const button = element("button", { type: "button", disabled: true, onclick: () => compare([...ticked], compared) }, "Compare");
  const heads = [["", ""], ["run", ""], ["state", ""], ["loss", "wide"], ["strategy", "wide"], ["workers", "number wide"], ["steps", "number wide"], ["accuracy", "number"], ["samples/s", "number wide"], ["faults", "number wide"], ["time", "number wide"], ["started", "wide"]];
  const head = element("tr", {}, ...heads.map(([text, style]) => element("th", { scope: "col", className: style }, text || element("span", { ariaLabel: "tick to compare" }, "✓"))));
  const table = element("table", {}, element("thead", {}, head), body);
  main.replaceChildren(element("h1", {}, "Runs"), element("div", { className: "row" }, button, element("span", { className: "soft" }, "Tick two or more to compare their curves.")),
    element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Runs" }, table), compared);
  let shown = "";
  const refresh = async () => {
    const runs = await ask("/api/runs"), found = JSON.stringify(runs);
    if (found === shown) return;
    shown = found;
    const held = document.activeElement?.dataset?.held;  // the focus stays where it is, for who has no mouse
    body.replaceChildren(...runs.map((run) => row(run, ticked, button)));
    if (!runs.length) body.replaceChildren(element("tr", {}, element("td", { colSpan: 12 }, "No runs yet: cordee train JOB.toml makes one.")));
    if (held) [...body.querySelectorAll("[data-held]")].find((each) => each.dataset.held === held)?.focus({ preventScroll: true });
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
  tick.dataset.held = `tick ${run.path}`;
  link.dataset.held = `link ${run.path}`;
  const cell = (text, style = "") => element("td", { className: style }, text);
  return element("tr", {}, element("td", {}, tick), element("td", {}, link, run.problem ? element("div", { className: "error" }, run.problem) : null),
    element("td", { className: `state ${run.state}` }, run.state), element("td", { className: "wide" }, spark(run.losses)), cell(run.strategy ?? "–", "wide"), cell(run.workers ?? "–", "number wide"),
    cell(run.steps === null ? "–" : run.steps.toLocaleString("en"), "number wide"), cell(percent(run.test_accuracy), "number"), cell(number(run.samples_per_second, 3), "number wide"), cell(run.faults === null ? "–" : String(run.faults), "number wide"), cell(duration(run.wall_seconds), "number wide"), cell(moment(run.started), "wide"));
}

// The loss over the whole run; its first and last value are its name.
function spark(losses) {
  if (losses.length < 2) return "–";
  const floor = Math.min(...losses.filter((loss) => loss > 0)), raw = losses.map((loss) => Math.log10(Math.max(loss, floor)));
  const low = Math.min(...raw), high = Math.max(...raw), y = (value) => (high > low ? 2 + (high - value) / (high - low) * 16 : 10);
  const svg = shape("svg", { class: "spark", viewBox: "0 0 80 20", role: "img", "aria-label": `loss from ${number(losses[0], 3)} to ${number(losses.at(-1), 3)}` });
  svg.append(shape("polyline", { class: "curve c0", points: raw.map((value, place) => `${(place / (raw.length - 1) * 80).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
  return svg;
}

async function compare(names, place) {
  const overviews = await Promise.all(names.map((name) => ask(`/api/run/${encodeURIComponent(name)}`)));
  const view = new View();
  view.setFull(Math.max(...overviews.map((each) => each.end - each.begin)));
  const kinds = { accuracy: "Test accuracy", loss: "Training loss", rate: "Samples per second" };
  const charts = Object.fromEntries(Object.entries(kinds).map(([key, title]) => [key, new CurveChart(view, title, 190, key === "accuracy" ? shortPercent : number)]));
  const draw = async () => {
    const all = await Promise.all(names.map(async (name, place) => {
      const shift = overviews[place].begin;  // each begins with its training
      const series = await ask(`/api/run/${encodeURIComponent(name)}/series?begin=${view.begin + shift}&end=${view.end + shift}&columns=${COLUMNS}`);
      for (const curve of Object.values(series.curves)) curve.x = curve.x.map((at) => at - shift);
      return series;
    }));
    for (const [key, chart] of Object.entries(charts)) chart.draw(all.map((each, place) => ({ name: names[place], ...each.curves[key] })));
  };
  view.addEventListener("zoom", draw);
  const legend = element("ol", {}, ...names.map((name, place) => {
    const final = overviews[place].rows.find(([label]) => label === "test");
    return element("li", {}, `${name} (${["solid", "dashed", "dotted", "dash-dot", "fine dots", "long dashes"][place % 6]}): ${overviews[place].step.toLocaleString("en")} steps, ${duration(overviews[place].end)}${final ? `, ${final[1]}` : ""}`);
  }));
  place.replaceChildren(element("h2", {}, "Comparison, by the time since training began"), legend, ...Object.values(charts).map((chart) => chart.figure));
  await draw();
}

