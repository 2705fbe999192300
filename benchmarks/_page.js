// What is wrong with the page that is shown, as a list of lines; nothing where everybody can read it.
(() => {
  const wrong = [], all = (css) => [...document.querySelectorAll(css)];
  const named = (e) => `<${e.tagName.toLowerCase()}> ${(e.getAttribute("aria-label") || e.textContent || "").trim().slice(0, 40)}`;
  const must = (good, fault) => good || wrong.push(fault);

  // the page as a whole
  const root = document.documentElement;
  must(root.scrollWidth <= innerWidth, `the page is ${root.scrollWidth} px wide in a window of ${innerWidth}`);
  must(root.lang, "no language is named");
  must(document.title.trim(), "no title");
  for (const part of ["header", "main", "footer", "nav"]) must(all(part).length === 1, `${all(part).length} of <${part}>`);

  // headings: one first, and none left out on the way down
  const levels = all("h1, h2, h3, h4, h5, h6").map((e) => +e.tagName[1]);
  must(levels.filter((n) => n === 1).length === 1 && levels[0] === 1, `headings ${levels}`);
  levels.forEach((n, at) => must(!at || n <= levels[at - 1] + 1, `a heading ${n} behind ${levels[at - 1]}`));

  // tables say what they are, and of what each cell is
  for (const table of all("table")) {
    must(table.caption?.textContent.trim(), `no caption: ${named(table)}`);
    must(table.tHead, `no head: ${named(table)}`);
    for (const row of table.tBodies[0]?.rows ?? []) must(row.cells[0]?.scope === "row", `no head of a row: ${named(row)}`);
    for (const row of table.rows) must(row.cells.length === table.rows[0].cells.length, `cells missing: ${named(row)}`);
    for (const cell of table.querySelectorAll("th")) must(["row", "col"].includes(cell.scope), `no scope: ${named(cell)}`);
  }

  // pictures have words
  for (const e of all("img")) must(e.hasAttribute("alt"), `no alt: ${e.src}`);
  for (const e of all("svg")) {
    must(e.getAttribute("role") === "img", `no role: ${named(e)}`);
    must(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby"), `no label: ${named(e)}`);
  }

  // what is wider than its place can be scrolled by keys, and has a name; what cannot be scrolled hides nothing
  for (const e of all("body *")) {
    const how = getComputedStyle(e), hidden = e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0;
    if (!hidden || how.overflowX === "visible" || e.closest("svg")) continue;
    must(e.tabIndex >= 0 && e.getAttribute("aria-label"), `no way to scroll by keys: ${named(e)}`);
    must(how.overflowX !== "hidden", `cut off: ${named(e)}`);
  }
  for (const e of all("a, summary")) {
    const box = e.getBoundingClientRect();
    must(!box.width || box.height >= 16, `too low to be hit, ${box.height} px: ${named(e)}`);
  }

  // letters stand out from what is behind them, by the contrast of WCAG 2
  const parsed = (text) => {
    const n = (text.match(/[\d.]+/g) || []).map(Number);
    return text === "none" || n.length < 3 ? [0, 0, 0, 0] : [n[0], n[1], n[2], n[3] ?? 1];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (c) => c.slice(0, 3).map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const faded = (e, stop) => { let o = 1; for (; e && e !== stop; e = e.parentElement) o *= +getComputedStyle(e).opacity; return o; };
  const behind = (e) => {
    const found = [];
    for (; e; e = e.parentElement) found.unshift(parsed(getComputedStyle(e).backgroundColor));
    return found.reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const behindInPicture = (text) => {
    const svg = text.ownerSVGElement, at = text.getBoundingClientRect();
    const x = at.left + at.width / 2, y = at.top + at.height / 2;
    let under = behind(svg.parentElement);
    for (const e of svg.querySelectorAll("rect, path, text")) {
      if (e === text) break;
      const box = e.getBoundingClientRect(), how = getComputedStyle(e);
      if (e.tagName === "text" || x < box.left || x > box.right || y < box.top || y > box.bottom) continue;
      const top = parsed(how.fill);
      top[3] *= +how.fillOpacity * faded(e, svg);
      under = over(top, under);
    }
    return under;
  };
  const faint = new Map();
  const compare = (e, ink, under, size, bold) => {
    const found = contrast(over(ink, under), under), least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const kind = `${e.tagName} ${ink} on ${under.map(Math.round)}`;
    if (found < least && !faint.has(kind)) faint.set(kind, `contrast ${found.toFixed(2)} below ${least}: ${named(e)} (${kind})`);
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement, how = getComputedStyle(e);
    if (!node.data.trim() || !e.getBoundingClientRect().width || ["title", "STYLE", "SCRIPT"].includes(e.tagName)) continue;
    const picture = e.tagName === "text", ink = parsed(picture ? how.fill : how.color);
    const high = parseFloat(how.fontSize) * (picture ? e.getScreenCTM().a : 1);
    if (high < 9) faint.set("small", `letters of ${high.toFixed(1)} px: ${named(e)}`);
    compare(e, ink, picture ? behindInPicture(e) : behind(e), parseFloat(how.fontSize), +how.fontWeight >= 600);
  }
  return [...wrong, ...faint.values()];
})()
