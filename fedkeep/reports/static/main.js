// What the reader has chosen, and everything drawn anew when that, the width, the theme or the data changes.

let data = JSON.parse($("#data").textContent);
const state = { seed: null, round: null, hidden: new Set(), sort: { key: "forgetting", down: false } };

function seedsOf(data) {
  return [...new Set(data.groups.flatMap((group) => group.runs.map((run) => run.seed)))].sort((a, b) => a - b);
}

// Keep what was chosen where it still exists; otherwise begin with the first seed and the round that lost most.
function settle() {
  const seeds = seedsOf(data);
  if (!seeds.includes(state.seed)) state.seed = seeds[0];
  const rounds = anatomyRounds(data, state.seed);
  if (!rounds.includes(state.round)) state.round = worstRound(data, state.seed);
  for (const label of $$("label.seeds")) {
    label.hidden = seeds.length < 2;
    const options = seeds.map((seed) => el("option", { value: seed, selected: seed === state.seed }, `${seed}`));
    $("select", label).replaceChildren(...options);
  }
  const slider = $("#round");
  slider.max = Math.max(0, rounds.length - 1);
  slider.value = Math.max(0, rounds.indexOf(state.round));
  slider.setAttribute("aria-valuetext", `round ${state.round}`);
  $(".slider output").textContent = state.round === null ? "" : `${state.round} of ${rounds.at(-1)}`;
}

const SECTIONS = { glance, heat, curves: accuracy, anatomy, drops, split };
const bodyOf = (name) => $(`#${name} > .body`);

// Draw sections; their heights are held meanwhile, so that the page does not jump.
function draw(names = Object.keys(SECTIONS)) {
  settle();
  tip.hide();
  for (const name of names) {
    const body = bodyOf(name);
    body.style.minHeight = `${body.offsetHeight}px`;
    body.replaceChildren();
    SECTIONS[name](data, body, state);
    body.style.minHeight = "";
  }
}

function drawAll() {
  $("#headline").textContent = data.verdict.headline;
  $("#details").replaceChildren(...data.verdict.details.map((line) => el("li", {}, line)));
  $("main").hidden = !data.groups.length; // nothing has been evaluated yet: the headline says so
  if (!data.groups.length) return;
  legend();
  draw();
  summary(data, state, change);
  about(data, bodyOf("about"));
}

function change(what) {
  Object.assign(state, what);
  if ("seed" in what) draw(["heat", "anatomy", "split"]);
  if ("round" in what) draw(["anatomy"]);
  if ("sort" in what) summary(data, state, change);
}

function legend() {
  const buttons = data.groups.map((group, index) => {
    const toggle = (event) => {
      state.hidden.has(group.label) ? state.hidden.delete(group.label) : state.hidden.add(group.label);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(group.label)));
      draw(["curves"]);
    };
    const pressed = String(!state.hidden.has(group.label));
    return el("button", { type: "button", "aria-pressed": pressed, onclick: toggle }, swatch(index), group.label);
  });
  $(".legend").replaceChildren(...buttons);
}

function isDark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// The theme is remembered where the browser lets a page remember something.
function remember(theme) {
  try {
    if (theme) localStorage.setItem("fedkeep-theme", theme);
    return localStorage.getItem("fedkeep-theme");
  } catch {
    return null;
  }
}

function listen() {
  const before = remember();
  if (before) document.documentElement.dataset.theme = before;
  $("#theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember(document.documentElement.dataset.theme);
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  for (const select of $$("label.seeds select")) {
    select.addEventListener("change", () => change({ seed: Number(select.value) }));
  }
  $("#round").addEventListener("input", (event) => {
    change({ round: anatomyRounds(data, state.seed)[event.target.value] });
  });
  $("#worst").addEventListener("click", () => change({ round: worstRound(data, state.seed) }));
  for (const button of $$("[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = tableAs(button.dataset.copy, data, state);
      const told = await copy(text).then(() => `Copied as ${button.textContent}.`, (error) => `Not copied: ${error.message}.`);
      $("#copied").textContent = told;
    });
  }
  $(".scale").append("0%", el("i"), "100%");
  let [width, waiting] = [innerWidth, 0];
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => draw());
  });
}

// While runs go on: ask for new data now and then, and draw it when there is some.
async function follow() {
  const badge = $("#live");
  badge.hidden = false;
  let mark = null;
  for (;;) {
    try {
      const answer = await fetch("data.json", { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      if (answer.status === 200) {
        mark = answer.headers.get("ETag");
        data = await answer.json();
        drawAll();
      }
      const runs = data.groups.flatMap((group) => group.runs);
      const done = runs.filter((run) => run.reached >= run.planned).length;
      const one = runs.length === 1 ? `round ${runs[0].reached} of ${runs[0].planned}` : null;
      badge.textContent = `live, ${one || (runs.length ? `${done} of ${runs.length} runs done` : "before the first round")}`;
      badge.classList.remove("lost");
    } catch {
      badge.textContent = "no longer connected; trying again";
      badge.classList.add("lost");
    }
    await new Promise((wake) => setTimeout(wake, 2000));
  }
}

listen();
drawAll();
if (data.live) follow();
