"use strict";
// Sort the table of layers by a column, and show only the rows that contain the text of the filter. Browsers are slow with tables
// of ten thousand rows, so the page shows at most MAX_ROWS of them. All rows are kept in `rows`.
const MAX_ROWS = 1000;
const words = new Intl.Collator("en", { numeric: true });
const table = document.getElementById("layers");
const input = document.getElementById("filter");
let rows = [];

function keyOf(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
}

function order(a, b) {
  if (typeof a === "string") return words.compare(a, b);
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return a < b ? -1 : a > b ? 1 : 0;
}

function sortBy(header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const keyed = rows.map((row) => [keyOf(row, header.cellIndex), row]);
  keyed.sort(([a], [b]) => (descending ? order(b, a) : order(a, b)));
  rows = keyed.map(([, row]) => row);
  show();
}

function show() {
  const wanted = input.value.toLowerCase();
  const found = rows.filter((row) => row.textContent.toLowerCase().includes(wanted));
  const body = document.createElement("tbody");
  body.append(...found.slice(0, MAX_ROWS).map((row) => row.cloneNode(true)));
  table.tBodies[0].replaceWith(body);
  const more = found.length > MAX_ROWS ? `, of which the first ${MAX_ROWS} are shown` : "";
  document.getElementById("shown").textContent = `${found.length} of ${rows.length} layers${more}`;
}

if (table) {
  rows = Array.from(table.tBodies[0].querySelectorAll("tr"));
  for (const header of table.tHead.rows[0].cells) header.firstElementChild.addEventListener("click", () => sortBy(header));
  input.addEventListener("input", show);
  show();
}
