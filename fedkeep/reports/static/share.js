// The card: a small picture with the result, what it is about and the figures, to paste in a chat; and the same as text.

const CARD_WIDTH = 720;
const CARD_ROWS = 5;

function cardFigures(data, state) {
  return shownEntries(data, state).slice(0, CARD_ROWS).map(({ group, slot }) => {
    const deviation = (key) => (isMissing(group.spread[key]) ? null : group.spread[key] * 100);
    const lost = isMissing(group.mean.forgetting) ? null : group.mean.forgetting * 100;
    const final = `${formatMean(group.mean.final * 100, deviation("final"), 1)}%`;
    return { slot, title: group.title, lost: formatMean(lost, deviation("forgetting"), 1), final };
  });
}

// Draw the card outside of the screen and return it as SVG.
function cardPicture(data, state) {
  const entries = heroEntries(data, state).map((entry) => ({ ...entry, map: heatMapOf(entry.group, state) }));
  const maps = el("div", { class: "card-maps" });
  const head = ["", "forgetting, points", "final accuracy"].map((text) => el("th", {}, text));
  const rows = cardFigures(data, state).map((row) =>
    el("tr", {}, el("td", {}, swatch(row.slot), ` ${row.title}`), el("td", {}, row.lost), el("td", {}, row.final)));
  const of = entries[0].group.runs.length > 1 ? `, ${entries[0].map.of}` : "";
  const card = el("div", { class: "card", style: { width: `${CARD_WIDTH}px` } },
    el("div", { class: "card-headline" }, data.verdict.headline),
    el("div", { class: "card-facts" }, data.facts.join(" · ")),
    maps,
    el("div", { class: "card-facts" }, `Accuracy of each class (rows) after each round (columns)${of}`),
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
    el("div", { class: "card-facts" }, `made with ${page.made_by}`));
  document.body.append(card);
  const worst = worstLoss(entries.map(({ map }) => map));
  const titled = entries.map((entry) => ({ ...entry, facts: "" }));
  appendFigures(maps, titled, ({ group, map }, plot) => drawHeatMap(plot, data, group, map, worst, true));
  const picture = toSvg(card);
  card.remove();
  return picture;
}

function cardText(data, state) {
  const figures = cardFigures(data, state).map((row) => `${row.title}: forgets ${row.lost} points, ends at ${row.final}`);
  return [data.verdict.headline, data.facts.join(" · "), ...figures, `made with ${page.made_by}`].join("\n") + "\n";
}

const SHARES = {
  async copy() {
    const picture = cardPicture(data, state);
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": toPng(picture) })]);
      return "Copied: paste it anywhere.";
    } catch {
      await savePicture(picture, "fedkeep-card", "png");
      return "This browser copies no pictures, so it was saved.";
    }
  },
  async save() {
    await savePicture(cardPicture(data, state), "fedkeep-card", "png");
    return "Saved.";
  },
  async text() {
    await copyText(cardText(data, state));
    return "Copied.";
  },
};

function addShareButtons() {
  for (const button of $$("[data-share]")) {
    button.addEventListener("click", async () => {
      $("#shared").textContent = await SHARES[button.dataset.share]().catch((error) => `Not done: ${error.message}.`);
    });
  }
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) throw new Error("the browser does not allow it");
  }
}
