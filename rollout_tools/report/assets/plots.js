// Draws the plots, and switches between the light and the dark theme.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const chosen = Object.fromEntries(Object.keys(figures).map((name) => [name, 0]));
  const root = document.documentElement;
  const darkPreferred = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  function withTheme(layout) {
    const style = getComputedStyle(root);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const themed = {
      ...layout,
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("text") },
      hoverlabel: { ...layout.hoverlabel, bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
    };
    for (const axis of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))) {
      themed[axis] = { gridcolor: color("grid"), linecolor: color("line"), zerolinecolor: color("line"), ...layout[axis] };
    }
    return themed;
  }

  function draw(name) {
    const figure = figures[name][chosen[name]];
    const element = document.getElementById(`plot-${name}`);
    element.style.minHeight = `${figure.layout.height}px`;
    return Plotly.react(element, figure.data, withTheme(figure.layout), config);
  }

  function drawAll() {
    return Promise.all(Object.keys(figures).map(draw));
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    root.style.colorScheme = theme;
  }

  setTheme(darkPreferred.matches ? "dark" : "light");
  darkPreferred.addEventListener("change", (event) => { setTheme(event.matches ? "dark" : "light"); drawAll(); });
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    drawAll();
  });
  for (const select of document.querySelectorAll("select[data-plot]")) {
    chosen[select.dataset.plot] = Number(select.value);
    select.addEventListener("change", () => { chosen[select.dataset.plot] = Number(select.value); draw(select.dataset.plot); });
  }
  drawAll().then(() => { root.dataset.drawn = "true"; });
})();
