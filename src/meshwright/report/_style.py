"""The style sheet of a page: two sets of colours, and nothing that is fetched."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1b1f24; --faint: #57606a; --line: #d0d7de; --band: #f4f6f8; --link: #0b57a4;
  --a: #4c78c8; --b: #3f9d6b; --c: #b58ac9; --d: #d9a441; --e: #c8584c; --f: #8a8f98;
  --wrong: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e3e7eb; --faint: #9aa4af; --line: #333a42; --band: #1d2127; --link: #7ab8ff;
    --wrong: #ff9d94; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
p, ul { margin: .4rem 0; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .6rem 0; }
dt { color: var(--faint); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .6rem 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding: .2rem 0; }
caption span { position: sticky; left: 0; display: inline-block; max-width: calc(100vw - 3.5rem); }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-weight: normal; overflow-wrap: normal; }
td:not(.number), tbody th { min-width: 5rem; }
thead th { font-weight: 600; border-bottom-width: 2px; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
code { font: .9em/1.4 ui-monospace, monospace; white-space: nowrap; }
details { margin: .15rem 0; padding-left: .9rem; border-left: 2px solid var(--line); }
summary { cursor: pointer; }
summary span { color: var(--faint); font-size: .9rem; }
.bar { display: flex; height: 1.4rem; margin: .5rem 0; background: var(--band); }
.bar span { min-width: 1px; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.k0 { background: var(--a); } .k1 { background: var(--e); } .k2 { background: var(--d); } .k3 { background: var(--c); }
.k4 { background: var(--b); } .k5 { background: var(--f); }
.wrong { color: var(--wrong); font-weight: 600; }
svg { display: block; min-width: 64rem; width: 100%; height: auto; }
.drawing svg > rect:first-of-type { fill: var(--band); } .drawing g > rect { stroke: var(--band); }
.drawing svg > text { fill: var(--ink); }
.curve .area { fill: var(--a); fill-opacity: .25; stroke: var(--a); }
.curve .limit { stroke: var(--e); stroke-dasharray: 6 4; } .curve .axis { stroke: var(--line); }
.curve text { fill: var(--ink); font-size: 11px; font-family: system-ui, sans-serif; }
footer { margin-top: 2rem; color: var(--faint); font-size: .9rem; }
@media (max-width: 30rem) { body { padding: .7rem; font-size: 15px; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: .4rem; } }
@media print { .wide { overflow: visible; } }
"""
