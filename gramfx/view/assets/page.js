"use strict";
/* Cytoscape.js draws and dagre lays out; here modules are folded, nodes found and told about. */
const data = JSON.parse(document.getElementById("data").textContent);
const stages = Object.keys(data.stages);
const MOST = 44; // nodes on the screen when a stage is opened
const MODULE = "\u25b8 "; // in front of the names of modules, so that no node has the same
const SUM = MODULE + "sum of the Gramians";
const byId = (id) => document.getElementById(id);

/* ---------------------------------------------------------------- modules */

function groupsOf(node) {
  // The modules around a node, outermost first; the backward of a module is a group of its own.
  const backward = data.backward.includes(node.kind);
  if (node.kind === "sum") return [SUM];
  if (!node.module) return [];
  const parts = node.module.split(".");
  return parts.map((_, i) => MODULE + (backward ? "backward of " : "") + parts.slice(0, i + 1).join("."));
}

class Pane {
  constructor(section, chosen) {
    this.section = section;
    this.name = section.querySelector(".name");
    this.folded = new Set();
    this.onChosen = chosen;
    this.cy = cytoscape({
      container: section.querySelector(".graph"), style: STYLE, minZoom: 0.02, maxZoom: 4,
      boxSelectionEnabled: false, autoungrabify: true,
    });
    this.cy.on("tap", "node", (event) => {
      const id = event.target.id();
      if (event.target.data("group")) this.toggle(id); else this.onChosen(this, id);
    });
    this.cy.on("tap", (event) => { if (event.target === this.cy) this.onChosen(this, null); });
  }

  open(stage) {
    this.stage = stage;
    this.nodes = new Map(data.stages[stage].map((node) => [node.name, node]));
    this.groups = new Map([...this.nodes.values()].map((node) => [node.name, groupsOf(node)]));
    this.members = new Map();
    for (const [name, groups] of this.groups)
      for (const group of groups) this.members.set(group, [...(this.members.get(group) || []), name]);
    for (const [group, members] of [...this.members]) if (members.length < 2) this.members.delete(group);
    this.foldUntil(MOST);
    this.draw(true);
  }

  /* Fold everything, then open the outermost groups, those that show the fewest nodes first, while there is room. */
  foldUntil(most) {
    this.folded = new Set(this.members.keys());
    for (;;) {
      const now = this.visible();
      const closed = [...now].filter((id) => this.folded.has(id));
      const depth = Math.min(...closed.map((id) => id.split(".").length));
      const sized = closed.filter((id) => id.split(".").length === depth && id !== SUM)
        .map((id) => [this.sizeOpened(id), id]).sort((a, b) => a[0] - b[0]);
      if (!sized.length || now.size + sized[0][0] - 1 > most) return;
      this.folded.delete(sized[0][1]);
    }
  }

  sizeOpened(group) {
    const inside = new Set();
    for (const name of this.members.get(group)) {
      const groups = this.chain(name);
      inside.add(groups[groups.indexOf(group) + 1] || name);
    }
    return inside.size;
  }

  chain(name) { return this.groups.get(name).filter((group) => this.members.has(group)); }

  shownAs(name) { return this.chain(name).find((group) => this.folded.has(group)) || name; }

  visible() { return new Set([...this.nodes.keys()].map((name) => this.shownAs(name))); }

  toggle(group) {
    if (this.folded.has(group)) this.folded.delete(group); else this.folded.add(group);
    this.draw(false);
    const shown = this.cy.getElementById(group);
    if (shown.nonempty()) this.cy.animate({ center: { eles: shown }, duration: 150 });
    this.onChosen(this, this.chosen || null);
  }

  draw(fit) {
    const elements = new Map();
    const parentOf = (id, chain) => {
      const open = chain.slice(0, chain.includes(id) ? chain.indexOf(id) : chain.length);
      for (const group of open) if (!elements.has(group)) elements.set(group, { data: {
        id: group, group: true, open: true, label: group, parent: open[open.indexOf(group) - 1] } });
      return open[open.length - 1];
    };
    for (const node of this.nodes.values()) {
      const id = this.shownAs(node.name);
      if (elements.has(id)) continue;
      const parent = parentOf(id, this.chain(node.name));
      const group = id !== node.name;
      const label = group ? `${id}\n${this.members.get(id).length} nodes` : labelOf(node);
      const colour = group ? (id === SUM ? data.colours.sum : id.startsWith(MODULE + "backward of") ? "#dbeafe" : "#eceff3")
        : data.colours[node.kind];
      const lines = label.split("\n");
      elements.set(id, { data: { id, group, label, parent, colour, kind: node.kind,
        width: 14 + 6.8 * Math.max(...lines.map((line) => line.length)), height: 10 + 14 * lines.length } });
    }
    const edges = new Map();
    for (const node of this.nodes.values()) for (const read of shownReads(node)) {
      const [source, target] = [this.shownAs(read), this.shownAs(node.name)];
      if (source !== target) edges.set(source + "\u0000" + target, { data: { source, target } });
    }
    this.cy.batch(() => { this.cy.elements().remove(); this.cy.add([...elements.values(), ...edges.values()]); });
    this.cy.layout({ name: "dagre", rankDir: "TB", nodeSep: 14, rankSep: 26, edgeSep: 6, ranker: "tight-tree",
      animate: false, fit: fit, padding: 24 }).run();
    this.name.textContent = `${this.stage}: ${this.nodes.size} nodes`;
    this.light(this.chosen);
  }

  light(name) {
    this.chosen = name;
    this.cy.elements().removeClass("chosen near");
    if (!name || !this.nodes.has(name)) return;
    const node = this.cy.getElementById(this.shownAs(name));
    node.addClass("chosen");
    node.connectedEdges().addClass("near");
  }

  show(name) {
    for (const group of this.chain(name)) this.folded.delete(group);
    this.draw(false);
    const node = this.cy.getElementById(name);
    this.cy.animate({ center: { eles: node }, zoom: Math.max(this.cy.zoom(), 0.9), duration: 200 });
  }

  mark(names) {
    this.cy.nodes().removeClass("hit");
    for (const name of names) this.cy.getElementById(this.shownAs(name)).addClass("hit");
  }
}

function shownReads(node) {
  // What a stage returns for its backward alone is told in the panel; as lines it would cross everything.
  return (node.reads || []).slice(0, node.kind === "output" ? 2 : undefined);
}

function labelOf(node) {
  const op = node.op === "placeholder" ? node.kind : node.op.replace(/^aten\./, "").replace(/^gramfx\./, "");
  return [node.kind === "gramian" ? node.mark : node.name, op, node.value].filter((line) => line).join("\n");
}

const STYLE = [
  { selector: "node[width]", style: { width: "data(width)", height: "data(height)", "background-color": "data(colour)" } },
  { selector: "node", style: { shape: "round-rectangle", "border-width": 1, "border-color": "#9aa7b3", label: "data(label)",
    "text-valign": "center", "text-halign": "center", "text-wrap": "wrap", "font-size": 11, color: "#22303c",
    "font-family": "DejaVu Sans Mono, monospace" } },
  { selector: "node[?group]", style: { "border-style": "dashed", "font-weight": "bold" } },
  { selector: "node[?open]", style: { "background-color": "#8fa3b5", "background-opacity": 0.07, "border-style": "solid",
    "border-color": "#b9c6d2", "text-valign": "top", "font-size": 10, color: "#6b7a88", padding: 8 } },
  { selector: "node[kind = 'gramian'], node[kind = 'cotangent']", style: { "border-width": 2, "border-color": "#4c6a85" } },
  { selector: "edge", style: { width: 1, "line-color": "#a9b6c2", "target-arrow-color": "#a9b6c2",
    "target-arrow-shape": "triangle", "arrow-scale": 0.7, "curve-style": "bezier" } },
  { selector: ".hit", style: { "border-width": 4, "border-color": "#f59f00" } },
  { selector: ".near", style: { width: 2.5, "line-color": "#d6336c", "target-arrow-color": "#d6336c" } },
  { selector: ".chosen", style: { "border-width": 4, "border-color": "#d6336c", "border-style": "solid" } },
];

/* ---------------------------------------------------------------- the panel */

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function spelled(key, held) {
  if (Array.isArray(held)) return held.join(", ");
  if (typeof held === "boolean") return held ? "yes" : "no";
  if (key === "seconds") return `${(held * 1e3).toPrecision(3)} ms predicted`;
  return typeof held === "number" ? held.toLocaleString("en") : String(held);
}

function told(pane, name) {
  const panel = byId("panel");
  panel.replaceChildren();
  const node = name && pane.nodes.get(name);
  if (!node) {
    element("h2", "The plan", panel);
    element("p", data.plan.length ? "A click on a node tells about it, on a module opens or folds it." : "Click on a node.", panel);
    if (data.plan.length) element("pre", data.plan.join("\n"), panel);
    return;
  }
  element("h2", node.name, panel);
  element("p", node.mark || node.kind, panel).className = "mark";
  const list = element("dl", undefined, panel);
  const row = (key, held) => { if (held) { element("dt", key, list); element("dd", held, list); } };
  row("op", node.op); row("axes", node.value); row("arguments", node.arguments);
  row("module", node.module); row("source", node.source);
  for (const [key, held] of Object.entries(node.plan || {})) row(key, spelled(key, held));
  const links = (title, names) => {
    if (!names.length) return;
    element("dt", title, list);
    const cell = element("dd", undefined, list);
    names.forEach((one, i) => {
      if (i) cell.append(", ");
      const link = element("a", one, cell);
      link.onclick = () => { pane.show(one); choose(pane, one); };
    });
  };
  links("reads", node.reads || []);
  links("read by", [...pane.nodes.values()].filter((one) => (one.reads || []).includes(name)).map((one) => one.name));
  const groups = pane.chain(name);
  if (groups.length) {
    const fold = element("button", `fold ${groups[groups.length - 1]}`, panel);
    fold.onclick = () => pane.toggle(groups[groups.length - 1]);
  }
}

/* ---------------------------------------------------------------- all together */

function choose(pane, name) {
  for (const one of panes()) one.light(name);
  told(pane, name);
}

const left = new Pane(byId("left"), choose);
let right = null;
const panes = () => (right && !byId("right").hidden ? [left, right] : [left]);

function find() {
  const wanted = byId("search").value.trim().toLowerCase();
  const holds = (node) => [node.name, node.op, node.module, node.subject, node.mark].some(
    (text) => text && text.toLowerCase().includes(wanted));
  for (const pane of panes()) {
    const names = wanted ? [...pane.nodes.values()].filter(holds).map((node) => node.name) : [];
    pane.mark(names);
    if (pane === left) { byId("hits").textContent = wanted ? `${names.length} found` : ""; left.found = names; }
  }
}

function openBeside(stage) {
  byId("right").hidden = !stage;
  left.cy.resize();
  if (!stage) return;
  right = right || new Pane(byId("right"), choose);
  right.cy.resize();
  right.open(stage);
  right.light(left.chosen);
}

for (const [id, first] of [["stage", []], ["beside", [""]]])
  for (const name of [...first, ...stages]) element("option", name || "nothing", byId(id)).value = name;
byId("stage").value = data.shown;
byId("stage").onchange = (event) => { left.open(event.target.value); told(left, left.chosen); find(); };
byId("beside").onchange = (event) => openBeside(event.target.value);
byId("search").oninput = find;
byId("search").onkeydown = (event) => {
  if (event.key !== "Enter" || !left.found || !left.found.length) return;
  const at = (left.found.indexOf(left.chosen) + 1) % left.found.length;
  left.show(left.found[at]); choose(left, left.found[at]); find();
};
byId("fold").onclick = () => { for (const pane of panes()) { pane.folded = new Set(pane.members.keys()); pane.draw(true); } };
byId("unfold").onclick = () => { for (const pane of panes()) { pane.folded = new Set(); pane.draw(true); } };
byId("fit").onclick = () => { for (const pane of panes()) pane.cy.fit(undefined, 24); };
for (const [kind, colour] of Object.entries(data.colours)) {
  const key = element("span", undefined, byId("legend"));
  key.className = "key";
  element("i", undefined, key).style.background = colour;
  element("span", kind, key);
}
left.open(data.shown);
told(left, null);
