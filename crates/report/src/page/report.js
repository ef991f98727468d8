// What the page does beyond its still pictures: a cursor in each chart, moved by pointer or keys, and what there is at it.
// The page is whole without it.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const MOST_GROUPS = 16;
  document.documentElement.classList.add("scripted");

  // Numbers, as the rest of the page writes them.
  const count = n => Math.round(n).toLocaleString("en-US");
  function bytes(n) {
    if (n < 1024) return `${n} B`;
    let value = n, unit = "";
    for (const name of ["KiB", "MiB", "GiB", "TiB"]) {
      if (value < 1023.95) break;
      value /= 1024;
      unit = name;
    }
    return `${value.toFixed(value < 10 ? 2 : 1)} ${unit}`;
  }
  function seconds(s) {
    if (s === 0) return "0 s";
    if (s < 1e-3) return `${(1e6 * s).toFixed(0)} µs`;
    if (s < 0.1) return `${(1e3 * s).toFixed(1)} ms`;
    if (s < 1) return `${(1e3 * s).toFixed(0)} ms`;
    if (s < 120) return `${s.toFixed(1)} s`;
    return s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
  }
  const moment = micros => data.timeline.has_seconds ? seconds(micros / 1e6) : count(micros);
  const words = name => name.replaceAll("_", " ");

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function drawn(parent, name, className) {
    const made = document.createElementNS(SVG, name);
    made.setAttribute("class", className);
    parent.append(made);
    return made;
  }

  // A slider over a chart: the pointer or the keys choose one of `size` places, and `show` tells what is there.
  function slider(area, size, start, name, show) {
    let place = start;
    const go = (next, silent) => {
      place = Math.min(size - 1, Math.max(0, next));
      const text = show(place, silent);
      area.setAttribute("aria-valuenow", place);
      area.setAttribute("aria-valuetext", text);
    };
    const attributes = { tabindex: 0, role: "slider", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": size - 1 };
    for (const [key, value] of Object.entries(attributes)) area.setAttribute(key, value);
    let pending = null;
    const point = event => {
      const box = area.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      if (pending === null) requestAnimationFrame(() => { go(pending()); pending = null; });
      pending = () => area.dataset.nearest ? Math.round(share * (size - 1)) : Math.floor(share * size);
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("keydown", event => {
      const far = Math.max(1, Math.round(size / 20));
      const keys = {
        ArrowLeft: place - 1, ArrowDown: place - 1, ArrowRight: place + 1, ArrowUp: place + 1,
        PageDown: place - far, PageUp: place + far, Home: 0, End: size - 1, Escape: start, p: start,
      };
      if (event.key in keys && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        go(keys[event.key]);
      }
    });
    go(start, true);
  }

  // What lives on a tier in a column, the largest groups first, and the rest that no list has.
  function alive(tier, column) {
    const all = tier.allocations, groups = new Map(), listed = new Map();
    for (let i = 0; i < all.first.length; i++) {
      if (all.first[i] > column || all.last[i] < column) continue;
      listed.set(all.tag[i], (listed.get(all.tag[i]) || 0) + all.bytes[i]);
      const key = `${all.tag[i]} ${all.name[i]} ${all.phase[i]}`;
      const layer = all.layer[i];
      let group = groups.get(key);
      if (!group) {
        group = { name: data.timeline.names[all.name[i]], tag: data.timeline.tags[all.tag[i]],
          phase: data.timeline.phases[all.phase[i]], count: 0, bytes: 0, since: all.birth[i], first: null, last: null };
        groups.set(key, group);
      }
      group.count += 1;
      group.bytes += all.bytes[i];
      group.since = Math.min(group.since, all.birth[i]);
      if (layer !== null) {
        group.first = group.first === null ? layer : Math.min(group.first, layer);
        group.last = group.last === null ? layer : Math.max(group.last, layer);
      }
    }
    let rest = 0;
    for (const [tag, live] of tier.live) rest += live[column] - (listed.get(tag) || 0);
    const sorted = [...groups.values()].sort((a, b) => b.bytes - a.bytes || (a.name < b.name ? -1 : 1));
    for (const group of sorted.splice(MOST_GROUPS)) rest += group.bytes;
    return { groups: sorted, rest };
  }

  function row(cells, className) {
    const made = element("tr", className);
    cells.forEach((cell, index) => {
      const box = element(index === 0 ? "th" : "td", index === 3 || index === 4 ? "n" : "");
      if (index === 0) box.scope = "row";
      box.append(...[cell].flat());
      made.append(box);
    });
    return made;
  }

  function showMoment(tier, column) {
    const timeline = data.timeline, { groups, rest } = alive(tier, column);
    const live = tier.live.reduce((sum, [, of]) => sum + of[column], 0);
    const layer = tier.layer[column], phase = timeline.phases[tier.phase[column]];
    const name = tier.tier[0].toUpperCase() + tier.tier.slice(1);
    const isPeak = column === tier.peak_column && tier.top[column] === tier.peak_bytes;
    const gaps = tier.top[column] - live;
    const when = isPeak ? `at the peak, ${moment(timeline.begins[column])}` : `at ${moment(timeline.begins[column])}`;
    document.getElementById("moment-title").textContent = `${name} ${when}: ${bytes(live)} live`;
    document.getElementById("moment-place").textContent =
      `${phase}${layer === null ? "" : `, layer ${layer}`}${gaps > 0 ? `; ${bytes(gaps)} of gaps below the highest allocation` : ""}`;
    const rows = groups.map(group => {
      const what = group.count > 1 ? [group.name + " ", element("span", "of", `× ${count(group.count)}`)] : group.name;
      const layers = group.first === null ? "" : group.first === group.last ? `${group.first}` : `${group.first}–${group.last}`;
      return row([what, [element("i", `swatch k-${group.tag}`), words(group.tag)], layers, bytes(group.bytes),
        group.since < 0 ? "before" : moment(group.since), group.phase]);
    });
    if (rest > 0) rows.push(row(["all others", "", "", bytes(rest), "", ""], "rest"));
    document.getElementById("moment-rows").replaceChildren(...rows);
    return `${moment(timeline.begins[column])}, ${phase}${layer === null ? "" : ` layer ${layer}`}: ${bytes(live)}`;
  }

  const atPlace = share => `${100 * share}%`;

  for (const figure of document.querySelectorAll("figure.tier")) {
    const tier = data.timeline.tiers[Number(figure.dataset.tier)];
    const area = figure.querySelector("svg.area"), size = data.timeline.begins.length;
    const cursor = drawn(area, "line", "cursor");
    cursor.setAttribute("y2", "100%");
    slider(area, size, tier.peak_column, `${tier.tier} memory through the step`, (column, silent) => {
      const at = atPlace((column + 0.5) / size);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      // When the page opens, the device has the word.
      return silent && figure.dataset.tier !== "0" ? "at the peak" : showMoment(tier, column);
    });
    for (const item of figure.querySelectorAll(".legend li")) {
      const kind = [...item.firstElementChild.classList].find(name => name.startsWith("k-")).slice(2);
      const light = on => {
        area.classList.toggle("faded", on);
        for (const part of area.querySelectorAll(".part")) part.classList.toggle("lit", on && part.dataset.kind === kind);
      };
      item.addEventListener("pointerenter", () => light(true));
      item.addEventListener("pointerleave", () => light(false));
    }
  }

  // Curves of a run.
  const said = {
    loss: bucket => bucket.loss === null ? "no number" : `loss ${bucket.loss.toFixed(4)}`,
    speed: bucket => bucket.tokens_per_second === null ? "no number" : `${count(bucket.tokens_per_second)} tokens/s`,
    memory: bucket => bytes(bucket.resident_bytes),
  };
  for (const figure of document.querySelectorAll("figure.curve")) {
    const buckets = data.run.buckets, key = figure.dataset.chart;
    const area = figure.querySelector("svg.area"), readout = figure.querySelector(".readout");
    const first = buckets[0].to, length = Math.max(1, buckets[buckets.length - 1].to - first);
    const cursor = drawn(area, "line", "cursor");
    cursor.setAttribute("y2", "100%");
    area.dataset.nearest = "yes";
    slider(area, buckets.length, buckets.length - 1, `${key} over the steps`, index => {
      const bucket = buckets[index];
      const at = atPlace(buckets.length === 1 ? 0.5 : (bucket.to - first) / length);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      const steps = bucket.from === bucket.to ? `step ${count(bucket.to)}` : `steps ${count(bucket.from)} to ${count(bucket.to)}`;
      return readout.textContent = `${steps}: ${said[key](bucket)}`;
    });
  }
})();
