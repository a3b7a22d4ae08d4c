// Numbers and moments in words, and elements without innerHTML: what a run says is text, never markup.

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const power = Math.min(4, Math.floor(Math.log10(Math.max(value, 1)) / 3));
  return `${Number((value / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(2)} %`;
}

// On an axis: without the digits that say nothing.
export function shortPercent(value, digits = 4) {
  return value === null || value === undefined ? "–" : `${Number((100 * value).toPrecision(digits))} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function moment(unix) {
  if (!unix) return "–";
  return new Date(unix * 1000).toLocaleString("sv").replace("T", " ");
}

export async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  const text = await answer.text();
  let value;
  try { value = JSON.parse(text); } catch { throw new Error(text || `the server answered ${answer.status}`); }
  if (!answer.ok) throw new Error(value.error || `the server answered ${answer.status}`);
  return value;
}
