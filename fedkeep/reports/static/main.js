// The state of the page. Sections are drawn again when the state, the width, the theme or the data changes.

let page = JSON.parse($("#data").textContent);
let data = page.problems[0]; // the problem that is shown
const state = {
  problem: null,
  seed: null, // of heat maps, the anatomy of a round and label counts
  mean: false, // whether heat maps show the mean over seeds instead
  round: null,
  shown: new Set(), // labels of the methods on the page
  chosen: false, // whether the user chose them
  slots: new Map(), // their colours
  sort: { key: "forgetting", down: false },
};

// Keep the selected seed and round if they still exist; otherwise select the typical seed and the round that lost most.
function updateControls() {
  const seeds = seedsOf(data);
  if (!seeds.includes(state.seed)) state.seed = data.seed;
  const rounds = anatomyRounds(data, state.seed);
  if (!rounds.includes(state.round)) state.round = worstRound(data, state.seed);
  for (const label of $$("label.seeds")) {
    label.hidden = seeds.length < 2;
    const isHeat = Boolean(label.closest("#hero, #heat"));
    const options = seeds.map((seed) => el("option", { value: seed, selected: seed === state.seed && !(isHeat && state.mean) }, `${seed}`));
    if (isHeat) options.push(el("option", { value: "mean", selected: state.mean }, `mean of ${seeds.length}`));
    $("select", label).replaceChildren(...options);
  }
  const slider = $("#round");
  $(".slider").hidden = $("#worst").hidden = rounds.length < 2;
  slider.max = Math.max(0, rounds.length - 1);
  slider.value = Math.max(0, rounds.indexOf(state.round));
  slider.setAttribute("aria-valuetext", `round ${state.round}`);
  $(".slider output").textContent = state.round === null ? "" : `${state.round} of ${rounds.at(-1)}`;
}

const SECTIONS = {
  hero: heroSection,
  glance: overviewSection,
  heat: heatMapSection,
  curves: curveSection,
  anatomy: anatomySection,
  drops: roundForgettingSection,
  recoverable: recoverableSection,
  personal: personalSection,
  split: splitSection,
};
const bodyOf = (name) => $(`#${name} > .body`);

// Draw sections; each keeps its height meanwhile, so that the page does not jump.
function drawSections(names = Object.keys(SECTIONS)) {
  updateControls();
  tooltip.hide();
  for (const name of names) {
    const body = bodyOf(name);
    body.style.minHeight = `${body.offsetHeight}px`;
    body.replaceChildren();
    SECTIONS[name](data, body, state);
    body.style.minHeight = "";
  }
}

function drawPage() {
  document.title = pageTitle();
  $("#headline").textContent = page.verdict.headline;
  drawProblems();
  $("main").hidden = !data; // no round has been evaluated yet: the headline says so
  if (!data) return;
  const details = page.problems.length > 1 ? [...data.verdict.details, ...page.verdict.details] : page.verdict.details;
  $("#details").replaceChildren(...details.map((line) => el("li", {}, line)));
  updateShown(data, state);
  drawFilter(data, state);
  drawSections();
  drawTable(data, state, updateState);
  aboutSection(data, bodyOf("about"));
}

// The title that the page was written with, also after an update.
function pageTitle() {
  const about = page.problems.length === 1 ? page.problems[0].title : "";
  return [page.verdict.headline.replace(/\.$/, ""), about, "fedkeep"].filter(Boolean).join(" · ");
}

// Select the problem that was selected before, or the first, and list all of them if there are several.
function drawProblems() {
  data = page.problems.find((problem) => problem.title === state.problem) || page.problems[0];
  const several = page.problems.length > 1;
  $("#problems").hidden = $("#problem").hidden = !several;
  $("#facts").textContent = several || !data ? "" : data.facts.join(" · ");
  if (!several) return;
  const focused = document.activeElement && document.activeElement.closest("#problems") ? data.title : null;
  $("#problems").replaceChildren(...page.problems.map((problem) => {
    const show = () => { Object.assign(state, { problem: problem.title, chosen: false }); drawPage(); };
    const pressed = String(problem === data);
    const button = el("button", { type: "button", "aria-pressed": pressed, onclick: show },
      el("b", {}, problem.title), el("span", {}, problem.verdict.headline));
    if (problem.title === focused) requestAnimationFrame(() => button.focus());
    return el("li", {}, button);
  }));
  $("#problem").textContent = `Shown below: ${data.facts.join(" · ")}`;
}

function updateState(changes) {
  Object.assign(state, changes);
  if ("seed" in changes || "mean" in changes) drawSections(["hero", "heat", "anatomy", "recoverable", "split"]);
  if ("round" in changes) drawSections(["anatomy"]);
  if ("sort" in changes) drawTable(data, state, updateState);
}

function isDark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// The theme that was chosen on an earlier visit; null if there is none or the browser does not allow storage.
function readTheme() {
  try {
    return localStorage.getItem("fedkeep-theme");
  } catch {
    return null;
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("fedkeep-theme", theme);
  } catch {
    // the theme lasts until the page is closed
  }
}

function addListeners() {
  const stored = readTheme();
  if (stored) document.documentElement.dataset.theme = stored;
  $("#theme").addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    if (data) drawSections();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => data && drawSections());
  for (const select of $$("label.seeds select")) {
    const chosen = () => (select.value === "mean" ? { mean: true } : { seed: Number(select.value), mean: false });
    select.addEventListener("change", () => updateState(chosen()));
  }
  $("#round").addEventListener("input", (event) => {
    updateState({ round: anatomyRounds(data, state.seed)[event.target.value] });
  });
  $("#worst").addEventListener("click", () => updateState({ round: worstRound(data, state.seed) }));
  for (const button of $$("[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = formatTable(button.dataset.copy, data, state);
      const message = await copyText(text).then(() => `Copied as ${button.textContent}.`, (error) => `Not copied: ${error.message}.`);
      $("#copied").textContent = message;
    });
  }
  for (const scale of $$(".scale")) scale.append("0%", el("i"), "100%");
  addSaveButtons();
  addShareButtons();
  addEventListener("beforeprint", startPrinting);
  addEventListener("afterprint", endPrinting);
  let [width, frame] = [innerWidth, 0];
  addEventListener("resize", () => {
    if (innerWidth === width || !data) return; // only the height changed: a phone's address bar
    width = innerWidth;
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => drawSections());
  });
}

// For print, everything is drawn again: as wide as a sheet of paper, on white, with nothing folded.
const beforePrint = { theme: null, folded: [] };

function startPrinting() {
  if (!data || document.body.classList.contains("printing")) return;
  beforePrint.theme = document.documentElement.dataset.theme || null;
  beforePrint.folded = $$("details:not([open])");
  for (const details of beforePrint.folded) details.open = true;
  document.documentElement.dataset.theme = "light";
  document.body.classList.add("printing");
  drawSections();
}

function endPrinting() {
  if (!document.body.classList.contains("printing")) return;
  document.body.classList.remove("printing");
  if (beforePrint.theme) document.documentElement.dataset.theme = beforePrint.theme;
  else delete document.documentElement.dataset.theme;
  for (const details of beforePrint.folded) details.open = false;
  drawSections();
}

// While runs are in progress: request new data every two seconds, and draw the page if there is some.
async function pollData() {
  const badge = $("#live");
  badge.hidden = false;
  let etag = null;
  for (;;) {
    try {
      const response = await fetch("data.json", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
      if (response.status === 200) {
        etag = response.headers.get("ETag");
        page = await response.json();
        drawPage();
      }
      const groups = page.problems.flatMap((problem) => problem.groups);
      const runs = groups.flatMap((group) => group.runs);
      const finished = groups.filter((group) => group.status === "finished").flatMap((group) => group.runs).length;
      const one = runs.length === 1 ? `round ${runs[0].reached} of ${runs[0].planned}` : null;
      badge.textContent = `live, ${one || (runs.length ? `${finished} of ${runs.length} runs finished` : "before the first round")}`;
      badge.classList.remove("lost");
    } catch {
      badge.textContent = "disconnected, retrying";
      badge.classList.add("lost");
    }
    await new Promise((wake) => setTimeout(wake, 2000));
  }
}

addListeners();
drawPage();
if (page.live) pollData();
