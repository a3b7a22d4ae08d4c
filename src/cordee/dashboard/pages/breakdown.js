// What belongs to a whole run, not to a moment of it: where members spent their time, staleness, prediction.

import { PHASES, shape, WIDTH } from "./chart.js";
import { bytes, duration, element, number, percent } from "./format.js";

const SIDE = 90, MANY = 50;

function tableOf(title, heads, rows) {
  const head = element("tr", {}, ...heads.map((text, place) => element("th", { scope: "col", className: place ? "number" : "" }, text)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((text, place) => element("td", { className: place ? "number" : "" }, text))));
  return element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: title }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

function folded(title, table) {
  return element("details", {}, element("summary", {}, `${title} as a table`), table);
}

// Of each member the share of each phase; beyond 50 members thin rows. First those that the others wait for.
export function sharesOf(phases) {
  const members = Object.entries(phases).map(([name, spent]) => {
    const total = spent.reduce((sum, each) => sum + each, 0);
    return { name, shares: spent.map((each) => (total ? each / total : 0)), total };
  }).filter((member) => member.total > 0).sort((one, other) => one.shares[3] - other.shares[3]);
  if (!members.length) return null;
  const title = "Where the time of each member went, first those that others wait for";
  const row = members.length > MANY ? 5 : 22, height = row * members.length + 6, begin = row > 10 ? SIDE : 6;
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}; the table has the values` });
  members.forEach((member, place) => {
    let left = begin;
    if (row > 10) svg.append(shape("text", { x: begin - 6, y: place * row + 17, "text-anchor": "end" }, member.name));
    member.shares.forEach((share, phase) => {
      const width = share * (WIDTH - begin - 10);
      if (width < 0.5) return;
      const bar = shape("rect", { class: `f${phase}`, x: left, y: place * row + 3, width, height: row > 10 ? row - 3 : row });
      bar.append(shape("title", {}, `${member.name}: ${PHASES[phase]} ${percent(share)}`));
      svg.append(bar);
      if (row > 10 && width > 90) svg.append(shape("text", { class: "inside", x: left + 5, y: place * row + 17 }, `${PHASES[phase]} ${Math.round(100 * share)} %`));
      left += width;
    });
  });
  const legend = element("p", { className: "soft legend" }, ...PHASES.map((name, phase) => element("span", {}, element("i", { className: `key k${phase}` }), ` ${name} `)));
  const table = tableOf(title, ["member", ...PHASES], members.map((member) => [member.name, ...member.shares.map(percent)]));
  return element("figure", {}, element("figcaption", {}, element("span", {}, title)), svg, legend, folded("Shares", table));
}

// How many gradients were overtaken by how many updates.
export function stalenessOf(ages) {
  const entries = Object.entries(ages).map(([age, count]) => [Number(age), count]).sort(([one], [other]) => one - other);
  if (!entries.length) return null;
  const title = "Staleness: gradients by how many updates had overtaken them", most = Math.max(...entries.map(([, count]) => count));
  const total = entries.reduce((sum, [, count]) => sum + count, 0), step = (WIDTH - 40) / entries.length;
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} 180`, role: "img", "aria-label": `${title}; the table has the values` });
  entries.forEach(([age, count], place) => {
    const height = 130 * count / most, x = 20 + place * step;
    svg.append(shape("rect", { class: "f0", x, y: 150 - height, width: Math.max(1, Math.min(step - 4, 80)), height }));
    if (step > 24) svg.append(shape("text", { x: x + Math.min(step - 4, 80) / 2, y: 168, "text-anchor": "middle" }, String(age)));
    if (step > 40) svg.append(shape("text", { x: x + Math.min(step - 4, 80) / 2, y: 144 - height, "text-anchor": "middle" }, `${Math.round(100 * count / total)} %`));
  });
  const table = tableOf(title, ["updates", "gradients", "share"], entries.map(([age, count]) => [String(age), count.toLocaleString("en"), percent(count / total)]));
  return element("figure", {}, element("figcaption", {}, element("span", {}, title)), svg, folded("Staleness", table));
}

// Which member sent how much to which other, over sockets.
export function linksOf(links) {
  if (!links.length) return null;
  const title = "Links: what each member sent to which other over sockets, the most first (shared memory is not counted)", few = links.slice(0, 12), side = WIDTH > 600 ? 230 : 150, most = links[0][2] || 1;
  const height = 22 * few.length + 6;
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}; the table has the values` });
  few.forEach(([from, to, sent], place) => {
    const width = Math.max(1, sent / most * (WIDTH - side - 100));
    svg.append(shape("text", { x: side - 6, y: place * 22 + 17, "text-anchor": "end" }, `${from} → ${to}`), shape("rect", { class: "f0", x: side, y: place * 22 + 4, width, height: 18 }),
      shape("text", { x: side + width + 6, y: place * 22 + 17 }, bytes(sent)));
  });
  const table = tableOf("Links", ["from", "to", "sent"], links.map(([from, to, sent]) => [from, to, bytes(sent)]));
  return element("figure", {}, element("figcaption", {}, element("span", {}, title)), svg, folded("Links", table));
}

// Of each round of clients: how many took part, and how many did not.
export function roundsOf(rounds) {
  if (!rounds.length) return null;
  const title = "Rounds: clients that took part, were late, dropped out or were refused", kinds = ["took part", "late", "dropped", "refused"], styles = [2, 1, 5, 3];
  const counts = rounds.map((round) => [round.num_took_part, round.late.length, round.dropped.length, round.refused.length]);
  const most = Math.max(1, ...counts.map((each) => each.reduce((total, count) => total + count, 0))), step = (WIDTH - 60) / rounds.length;
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} 160`, role: "img", "aria-label": `${title}; the table has the values` });
  svg.append(shape("text", { x: 40, y: 16, "text-anchor": "end" }, String(most)), shape("text", { x: 40, y: 136, "text-anchor": "end" }, "0"));
  counts.forEach((each, place) => {
    let below = 0;
    each.forEach((count, kind) => {
      const height = 120 * count / most;
      if (count) svg.append(shape("rect", { class: `f${styles[kind]}`, x: 48 + place * step, y: 132 - below - height, width: Math.max(1, Math.min(step - 2, 60)), height }));
      below += height;
    });
    if (place % Math.ceil(rounds.length * 40 / WIDTH) === 0) svg.append(shape("text", { x: 48 + place * step + Math.min(step - 2, 60) / 2, y: 152, "text-anchor": "middle" }, String(rounds[place].round)));
  });
  const legend = element("p", { className: "soft legend" }, ...kinds.map((name, kind) => element("span", {}, element("i", { className: `key k${styles[kind]}` }), ` ${name} `)));
  const last = rounds.at(-1), spent = last.epsilon === null ? [] : [element("p", {}, `ε ${number(last.epsilon)} spent after round ${last.round}.`)];
  const table = tableOf("Rounds", ["round", "asked", ...kinds, "ε", "time", "sent by clients"], rounds.slice(-200).map((round, place) => [String(round.round), String(round.num_asked),
    ...counts.slice(-200)[place].map(String), number(round.epsilon), duration(round.seconds), bytes(round.bytes_sent)]));
  return element("figure", {}, element("figcaption", {}, element("span", {}, title)), svg, legend, ...spent, folded("Rounds", table));
}

// One sampled step of a pipeline: which micro-batch was in which pass when, and the bubble.
export function passesOf(found) {
  if (!found) return null;
  const kinds = { forward: ["F", 0], backward: ["B", 1], weights: ["W", 2] }, milliseconds = (seconds) => `${number(1000 * seconds, 3)} ms`;
  const title = `Pipeline: the passes of micro-batches in step ${found.step.toLocaleString("en")}`, members = Object.entries(found.members);
  const row = 26, bottom = row * members.length + 6, width = WIDTH - SIDE - 10, x = (at) => SIDE + (at - found.begin) / found.seconds * width;
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${bottom + 20}`, role: "img", "aria-label": `${title}; the table has the values` });
  members.forEach(([name, rows], place) => {
    svg.append(shape("text", { x: SIDE - 6, y: place * row + 20, "text-anchor": "end" }, name), shape("rect", { class: "idle", x: SIDE, y: place * row + 4, width, height: row - 4 }));
    for (const [kind, stage, microbatch, begin, spent] of rows) {
      const [letter, style] = kinds[kind], length = spent / found.seconds * width;
      const bar = shape("rect", { class: `f${style} pass`, x: x(begin), y: place * row + 4, width: Math.max(0.7, length), height: row - 4 });
      bar.append(shape("title", {}, `${name}, stage ${stage}, micro-batch ${microbatch}: ${kind} ${milliseconds(spent)}`));
      svg.append(bar);
      if (length > 22) svg.append(shape("text", { class: "inside", x: x(begin) + length / 2, y: place * row + 19, "text-anchor": "middle" }, `${letter}${microbatch}`));
    }
  });
  const parts = WIDTH > 600 ? 4 : 2;
  for (let part = 0; part <= parts; part += 1) svg.append(shape("text", { x: SIDE + part / parts * width, y: bottom + 14, "text-anchor": part === parts ? "end" : part ? "middle" : "start" }, milliseconds(part / parts * found.seconds)));
  const theory = found.theory, text = [];
  if (found.bubble !== null) text.push(`The bubble, in which workers have no pass to compute, is ${percent(found.bubble)} of the time from the first pass to the last.`);
  if (theory) text.push(`In theory it is ${percent(theory.bubble)} for ${theory.workers} workers, ${theory.stages} stages and ${theory.microbatches} micro-batch${theory.microbatches === 1 ? "" : "es"}, if all passes are equally long and sending takes no time.`);
  if (found.num_members > members.length) text.push(`${members.length} of ${found.num_members} workers are shown.`);
  const legend = element("p", { className: "soft legend" }, ...Object.entries(kinds).filter(([kind]) => members.some(([, rows]) => rows.some((each) => each[0] === kind)))
    .map(([kind, [letter, style]]) => element("span", {}, element("i", { className: `key k${style}` }), ` ${letter} ${kind} `)), element("span", {}, element("i", { className: "key kidle" }), " no pass: waiting and sending"));
  const table = tableOf("Passes", ["worker", "stage", "micro-batch", "pass", "begin", "length"], members.flatMap(([name, rows]) => rows.slice(0, 200).map(([kind, stage, microbatch, begin, spent]) =>
    [name, String(stage), String(microbatch), kind, milliseconds(begin - found.begin), milliseconds(spent)])));
  return element("figure", {}, element("figcaption", {}, element("span", {}, title)), svg, legend, element("p", {}, text.join(" ")), folded("Passes", table));
}

// What the planner predicted, and what was measured. Phases are shares of the measured time of a step.
export function predictionOf(facts, early, phases) {
  const rows = [];
  const add = (name, predicted, measured, unit, factor) => {
    if (predicted && measured) rows.push([name, `${number(predicted * factor, 3)} ${unit}`, `${number(measured * factor, 3)} ${unit}`, `${predicted >= measured ? "+" : "−"}${number(Math.abs(100 * (predicted / measured - 1)), 2)} %`]);
  };
  const members = Object.entries(phases).filter(([name]) => name.startsWith("worker")).map(([, spent]) => spent.slice(0, 4)).filter((spent) => spent.some((each) => each));
  const loops = members.map((spent) => spent.reduce((sum, each) => sum + each, 0)), all = loops.reduce((sum, each) => sum + each, 0);
  const mean = (phase) => members.reduce((sum, spent) => sum + spent[phase], 0) / all * facts.step_seconds;
  add("time of a step", facts.predicted_step_seconds, facts.step_seconds, "ms", 1000);
  if (early && all && facts.step_seconds) {
    add("· compute, of the busiest worker", early.compute_seconds, Math.max(...members.map((spent, place) => spent[1] / loops[place])) * facts.step_seconds, "ms", 1000);
    add("· exchange", early.exchange_seconds, mean(2), "ms", 1000);
    add("· waiting for other workers", early.idle_share * early.step_seconds, mean(3), "ms", 1000);
    if (mean(0) > 0) rows.push(["· waiting for data", "–", `${number(1000 * mean(0), 3)} ms`, "–"]);
  }
  add("memory of a worker", facts.predicted_memory_bytes, facts.peak_memory_bytes, "MB", 1e-6);
  if (!rows.length) return null;
  const doubt = facts.prediction_is_sure === false ? [element("p", { className: "soft" }, "The machine was busy when the planner measured: the prediction is not reliable.")] : [];
  return element("section", {}, element("h2", {}, "Predicted and measured"), tableOf("Predicted and measured", ["what", "predicted", "measured", "error"], rows), ...doubt);
}
