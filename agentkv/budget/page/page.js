"use strict";
// Click on a column's head: sort the table by it, a second time the other way round. Folded rows stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.tHead.rows[0].querySelectorAll("th").forEach((head, column) => {
    head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => {
        const cell = row.cells[column];
        return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
      };
      const rows = [...body.rows].filter((row) => !row.classList.contains("folded"));
      const folded = [...body.rows].filter((row) => row.classList.contains("folded"));
      rows.sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        return (left < right ? -1 : left > right ? 1 : 0) * (up ? 1 : -1);
      });
      body.append(...rows, ...folded);
    });
  });
}
document.documentElement.dataset.ready = "yes";
