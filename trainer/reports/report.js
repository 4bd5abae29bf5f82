// Filter, sort and hide the rows of the tables of runs, and hide their lines in the charts. Asks for nothing over a
// network, keeps nothing, and without it the tables are whole.
"use strict";

const COMPARE = {
  "=": (cell, wanted) => cell === wanted,
  "<": (cell, wanted) => cell < wanted,
  ">": (cell, wanted) => cell > wanted,
};

/** Return the value of a cell: a number if both it and `like` are numbers, else its text in lower case. */
function valueOf(cell, like) {
  const key = cell.dataset.key ?? cell.textContent.trim();
  return key !== "" && like !== "" && !isNaN(key) && !isNaN(like) ? Number(key) : key.toLowerCase();
}

/** Return a test of a row for one word of the filter: `column=value`, `column<value`, `column>value`, or any text. */
function testOf(word, heads) {
  const parts = /^(.+?)([=<>])(.+)$/.exec(word);
  const column = parts ? heads.findIndex(head => head.includes(parts[1])) : -1;
  if (column < 0) return row => row.textContent.toLowerCase().includes(word);
  const wanted = isNaN(parts[3]) ? parts[3] : Number(parts[3]);
  return row => COMPARE[parts[2]](valueOf(row.cells[column], parts[3]), wanted);
}

function setUp(box) {
  const table = box.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headCells = [...table.tHead.rows[0].cells];
  const heads = headCells.map(head => head.textContent.trim().toLowerCase());
  const filter = box.querySelector("input[type=search]");
  const count = box.querySelector(".count");

  const linesOf = row => document.querySelectorAll(`svg .arm${row.dataset.arm}`);

  function show() {
    const tests = filter.value.toLowerCase().split(/\s+/).filter(Boolean).map(word => testOf(word, heads));
    let shown = 0;
    for (const row of rows) {
      const fits = tests.every(test => test(row));
      row.hidden = !fits;
      shown += fits;
      const visible = fits && row.querySelector("input").checked;
      row.classList.toggle("off", !visible);
      for (const line of linesOf(row)) line.style.display = visible ? "" : "none";
    }
    count.textContent = `${shown} of ${rows.length}`;
  }

  function sortBy(column) {
    const head = headCells[column];
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of headCells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const keys = new Map(rows.map(row => [row, row.cells[column].dataset.key ?? ""]));
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");  // what was not measured is last, either way
      const order = !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);
      return down ? -order : order;
    };
    rows.sort((a, b) => compare(keys.get(a), keys.get(b)));
    body.append(...rows);
  }

  filter.addEventListener("input", show);
  headCells.forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.addEventListener("click", () => sortBy(column));
  });
  body.addEventListener("change", show);
  box.querySelector(".all").addEventListener("click", () => {
    const fitting = rows.filter(row => !row.hidden).map(row => row.querySelector("input"));
    const on = !fitting.some(input => input.checked);
    for (const input of fitting) input.checked = on;
    show();
  });
  for (const row of rows) {
    row.addEventListener("pointerenter", () => linesOf(row).forEach(line => line.classList.add("on")));
    row.addEventListener("pointerleave", () => linesOf(row).forEach(line => line.classList.remove("on")));
  }
  for (const control of box.querySelectorAll("[hidden]")) control.hidden = false;
  show();
}

document.querySelectorAll(".runs").forEach(setUp);
