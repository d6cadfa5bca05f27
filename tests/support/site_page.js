// Functions that tests/project/test_site_in_browser.py adds to the pages of the built site, and to pictures.

// What is outside of the page's column, except for the content of code and tables, which scroll. Signatures do not.
// The padding of inline code may hang out by 4 pixels.
function outside() {
  const column = document.querySelector("article").getBoundingClientRect();
  return [...document.querySelectorAll("article *")].filter((element) => {
    if (element.matches(".doc-signature code") && element.scrollWidth > element.clientWidth + 1) return true;
    const box = element.getBoundingClientRect();
    return box.width && !element.closest(".highlight, pre, .md-typeset__scrollwrap")
      && (box.right > column.right + 4 || box.left < column.left - 4);
  }).map((element) => element.outerHTML.slice(0, 100));
}

// Words in tables that take more than five lines, such as paths in a column that is too narrow.
function broken() {
  const found = [];
  for (const cell of document.querySelectorAll("article td, article th")) {
    if (cell.textContent.length < 20) continue;
    const nodes = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), range = document.createRange();
    let word = "", lines = new Set();
    while (nodes.nextNode()) {
      for (const match of nodes.currentNode.data.matchAll(/\s+|\S/g)) {
        if (!match[0].trim()) { [word, lines] = ["", new Set()]; continue; }
        range.setStart(nodes.currentNode, match.index);
        range.setEnd(nodes.currentNode, match.index + 1);
        word += match[0];
        if (lines.size < lines.add(Math.round(range.getBoundingClientRect().top)).size && lines.size === 6) found.push(word);
      }
    }
  }
  return found;
}

// [the size of the smallest text of an SVG document in pixels, the texts that leave the picture]
function texts() {
  const all = [...document.querySelectorAll("text")], view = document.documentElement.getBoundingClientRect();
  const size = (text) => {
    const matrix = text.getScreenCTM();
    return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(matrix.a, matrix.b);
  };
  const isCut = (text) => {
    const box = text.getBoundingClientRect();
    return box.left < 0 || box.top < 0 || box.right > view.right || box.bottom > view.bottom;
  };
  return [Math.min(...all.map(size)), all.filter(isCut).map((text) => text.textContent)];
}

// whether a picture shows the drawing for the window's width, which browsers load a moment after a resize
function isCurrent(image) {
  const narrow = image.parentElement.querySelector("source");
  return !narrow || matchMedia(narrow.media).matches === image.currentSrc.endsWith(narrow.getAttribute("srcset").split("/").pop());
}

// [address, width divided by the natural width] of every picture, once all are loaded
async function pictures() {
  const all = [...document.querySelectorAll("article img[src$='.svg']")];
  for (let i = 0; i < 500 && !all.every(isCurrent); ++i) await new Promise((done) => setTimeout(done, 10));
  await Promise.all(all.map((image) => image.decode()));
  return all.map((image) => [image.currentSrc, image.width / image.naturalWidth]);
}

// the address of the first result of the search, once there is one
async function firstResult() {
  for (let i = 0; i < 400; ++i) {
    const found = document.querySelector(".md-search-result__link");
    if (found) return found.href.split("?")[0];
    await new Promise((done) => setTimeout(done, 50));
  }
  return null;
}
