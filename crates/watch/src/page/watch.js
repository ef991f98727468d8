"use strict";
(() => {
  const at = id => document.getElementById(id);
  const runs = at("runs"), connection = at("connection");
  const token = new URLSearchParams(location.search).get("token");
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  const windows = [null, 1000, 300, 100, 30, 10];
  let zoom = 0, paused = false, shown = null, asked = 0;

  // One question at a time, so that a slow answer is never overtaken by its successor.
  async function ask() {
    const number = ++asked;
    const of = windows[zoom] === null ? "" : `?window=${windows[zoom]}`;
    try {
      const answer = await fetch(`runs${of}`, { headers, cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      const text = await answer.text();
      if (number !== asked || paused) return;
      if (text !== shown) {
        // The watcher has escaped everything that comes from files.
        const events = [...runs.querySelectorAll(".events")].map(list => list.scrollTop);
        runs.innerHTML = text;
        runs.querySelectorAll(".events").forEach((list, i) => { list.scrollTop = events[i] || 0; });
        shown = text;
      }
      connection.className = "";
      connection.textContent = `as of ${new Date().toLocaleTimeString()}`;
    } catch (error) {
      if (number !== asked || paused) return;
      connection.className = "lost";
      connection.textContent = error.message === "401"
        ? "the address needs the token that plimsoll watch has printed"
        : "the watcher does not answer: it was stopped, or the connection is gone";
    }
  }

  async function go() {
    if (!paused && !document.hidden) await ask();
    setTimeout(go, 1000);
  }

  function pause() {
    paused = !paused;
    at("pause").setAttribute("aria-pressed", paused);
    at("pause").textContent = paused ? "Go on" : "Pause";
    if (paused) connection.textContent = "paused; the run goes on";
    else ask();
  }

  function zoomTo(step) {
    zoom = Math.min(Math.max(step, 0), windows.length - 1);
    at("zoom").textContent = windows[zoom] === null ? "all steps" : `last ${windows[zoom]} steps`;
    if (!paused) ask();
  }

  function help() { at("keys").hidden = !at("keys").hidden; }

  at("pause").addEventListener("click", pause);
  at("in").addEventListener("click", () => zoomTo(zoom + 1));
  at("out").addEventListener("click", () => zoomTo(zoom - 1));
  at("ask").addEventListener("click", help);
  const keys = { p: pause, " ": pause, "+": () => zoomTo(zoom + 1), "=": () => zoomTo(zoom + 1), "-": () => zoomTo(zoom - 1), "?": help };
  document.addEventListener("keydown", event => {
    const onButton = event.key === " " && event.target instanceof HTMLButtonElement;
    if (!(event.key in keys) || onButton || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) ask(); });
  go();
})();
