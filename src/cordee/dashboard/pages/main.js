// Which page is shown, and the theme.

import { element } from "./format.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";

const main = document.getElementById("main"), trail = document.getElementById("trail"), theme = document.getElementById("theme");
const THEMES = ["system", "light", "dark"];

function setTheme(name) {
  if (name === "system") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = name;
  theme.textContent = `Theme: ${name}`;
  localStorage.setItem("theme", name);
}
theme.addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("theme") ?? "system") + 1) % 3]));
setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system");

const [, kind, name] = location.pathname.split("/");
try {
  if (kind === "run") {
    document.title = `${decodeURIComponent(name)} · Cordée`;
    trail.replaceChildren(element("a", { href: "/" }, "All runs"));
    await showRun(main, decodeURIComponent(name));
  } else {
    await showRuns(main);
  }
} catch (problem) {
  main.replaceChildren(element("h1", {}, "This page cannot be shown"), element("p", { className: "error" }, problem.message), element("p", {}, element("a", { href: "/" }, "All runs")));
}
