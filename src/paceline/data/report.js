"use strict";
// Draws the figures in the page's colours and offers its data as files. Without it the page shows images.
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isTouched = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it does not zoom a plot
  const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

  function coloured(panel) {
    const style = getComputedStyle(document.documentElement);
    const colours = new Map(data.colours.map((mark) => [mark, style.getPropertyValue("--" + mark.slice(1)).trim()]));
    return JSON.parse(JSON.stringify(panel), (_, value) => colours.get(value) ?? value);
  }

  function draw() {
    for (const box of document.querySelectorAll("[data-figure]")) {
      box.hidden = false;
      box.parentElement.classList.add("drawn");
      box.querySelectorAll(".plot").forEach((place, i) => {
        const { data: traces, layout } = coloured(data.figures[box.dataset.figure][i]);
        Plotly.react(place, traces, { ...layout, dragmode: isTouched ? false : "zoom" }, options);
      });
    }
  }

  const files = { "rows.csv": [data.rows, "text/csv"], "report.json": [JSON.stringify(data.report, null, 1), "application/json"] };
  for (const link of document.querySelectorAll("a[download]")) {
    const [text, type] = files[link.download];
    link.href = URL.createObjectURL(new Blob([text], { type }));
  }
  document.getElementById("downloads").hidden = false;

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
  dark.addEventListener("change", draw);
  draw();
})();
