// Draws the new data of a repository, summed up over the days of the table, which has the same numbers as text.
"use strict";
(() => {
  const place = document.getElementById("chart");
  let drawn = "";
  function draw() {
    const rows = [...document.querySelectorAll("#growth-data tbody tr")].reverse();
    const moments = rows.map((row) => Number(row.dataset.moment));
    let sum = 0;
    const sums = rows.map((row) => (sum += Number(row.dataset.new)) / 2 ** 30);
    const style = getComputedStyle(place);
    const state = JSON.stringify([moments, sums, place.clientWidth, style.color]);
    if (state === drawn || !moments.length) return;
    drawn = state;
    place.replaceChildren();
    const text = getComputedStyle(document.body).color;
    const axis = { stroke: text, grid: { stroke: "rgba(128, 128, 128, 0.3)" }, ticks: { stroke: "rgba(128, 128, 128, 0.3)" } };
    new uPlot(
      {
        width: place.clientWidth,
        height: 240,
        series: [{}, { label: "GiB", stroke: style.color, width: 2, points: { show: moments.length < 60 } }],
        axes: [axis, { ...axis, size: 70 }],
      },
      [moments, sums],
      place,
    );
  }
  document.addEventListener("htmx:after:swap", draw);
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
