"use strict";
// Sorts the table of layers by a column, and shows the rows whose text holds what is typed.
const table = document.getElementById("layers");
const shownRows = document.getElementById("shown");

function keyOf(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
}

function order(a, b) {
  if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return a < b ? -1 : a > b ? 1 : 0;
}

function sortBy(header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const keyed = Array.from(table.tBodies[0].rows, (row) => [keyOf(row, header.cellIndex), row]);
  keyed.sort(([a], [b]) => (descending ? order(b, a) : order(a, b)));
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

function filter(text) {
  const wanted = text.toLowerCase();
  let count = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
    count += !row.hidden;
  }
  shownRows.textContent = `${count} of ${table.tBodies[0].rows.length} layers`;
}

if (table) {
  for (const header of table.tHead.rows[0].cells) header.firstElementChild.addEventListener("click", () => sortBy(header));
  document.getElementById("filter").addEventListener("input", (event) => filter(event.target.value));
  filter("");
}
