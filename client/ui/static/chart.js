// Draws the new data of a repository, summed up over the days of the table, which has the same numbers as text.
"use strict";
(() => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let drawn = "";
  function draw() {
    const section = document.getElementById("growth-chart");
    const rows = [...document.querySelectorAll("#growth-data tbody tr")].reverse();
    if (!section || rows.length < 2) return;
    section.hidden = false;
    const place = document.getElementById("chart");
    const moments = rows.map((row) => Number(row.dataset.moment));
    let sum = 0;
    const sums = rows.map((row) => (sum += Number(row.dataset.new)));
    const unit = Math.min(Math.floor(Math.log2(Math.max(sum, 1)) / 10), units.length - 1);
    const text = getComputedStyle(document.body).color;
    const line = getComputedStyle(place).color;
    const state = JSON.stringify([moments, sums, place.clientWidth, line]);
    if (state === drawn) return;
    drawn = state;
    place.replaceChildren();
    const faint = { stroke: "rgba(128, 128, 128, 0.3)" };
    const axis = { stroke: text, grid: faint, ticks: faint };
    new uPlot(
      {
        width: place.clientWidth,
        height: 240,
        // Days are those of the table, in UTC.
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        legend: { show: false },
        cursor: { show: false },
        scales: { y: { range: (_, least, most) => [0, most * 1.05 || 1] } },
        series: [{}, { stroke: line, width: 2, points: { show: moments.length < 60 } }],
        axes: [
          { ...axis, space: 90, values: "{YYYY}-{MM}-{DD}", incrs: [1, 2, 7, 14, 28, 56].map((days) => days * 86400) },
          { ...axis, size: 80, values: (_, ticks) => ticks.map((tick) => `${+tick.toFixed(2)} ${units[unit]}`) },
        ],
      },
      [moments, sums.map((bytes) => bytes / 2 ** (10 * unit))],
      place,
    );
  }
  document.addEventListener("htmx:after:swap", draw);
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
