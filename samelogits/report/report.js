"use strict";
const tools = document.getElementById("tools");
if (tools) {
  const rows = [...document.querySelectorAll("#taps tbody tr")];
  const text = document.getElementById("filter");
  const outside = document.getElementById("outside");
  const count = document.getElementById("count");
  const names = rows.map((row) => row.textContent.toLowerCase());
  const apply = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !(words.every((word) => names[i].includes(word)) && (!outside.checked || row.classList.contains("out")));
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = `${shown} of ${rows.length} rows`;
  };
  text.addEventListener("input", apply);
  outside.addEventListener("change", apply);
  tools.hidden = false;
  apply();
}
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("section:not(#hashes) > details:not([open])")];
  closed.forEach((details) => { details.open = true; });
});
addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));
