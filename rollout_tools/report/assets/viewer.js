// Shows the rollouts of a problem side by side, and compares two of them. All texts are set as text, never as HTML.
"use strict";
(() => {
  const problems = JSON.parse(document.getElementById("problems").textContent);
  if (!problems.length) return;
  const sourceNames = Object.fromEntries(JSON.parse(document.getElementById("sources").textContent).map((one) => [one.code, one.name]));
  const [problemSelect, generationSelect, columns, comparison] = ["problem", "generation", "columns", "comparison"].map((id) => document.getElementById(id));
  const prompt = document.getElementById("prompt");
  const MAX_COLUMNS = 4;
  let compared = { A: null, B: null };

  function element(name, properties = {}, ...children) {
    const created = Object.assign(document.createElement(name), properties);
    created.append(...children);
    return created;
  }

  // Appends tokens, with successive tokens of the same kind in one element.
  function appendTokens(parent, rollout, different) {
    let text = "", kind = null;
    const flush = () => {
      if (!text) return;
      const [code, isDifferent] = kind;
      const classes = [code ? `source-${code}` : "", isDifferent ? "different" : ""].filter(Boolean).join(" ");
      const title = code ? `accepted draft token, from: ${sourceNames[code] ?? "unknown"}` : "";
      parent.append(classes ? element("span", { className: classes, title }, text) : text);
      text = "";
    };
    rollout.tokens.forEach((token, index) => {
      const next = [rollout.sources[index] ?? 0, different ? different[index] : false];
      if (!kind || next[0] !== kind[0] || next[1] !== kind[1]) { flush(); kind = next; }
      text += token;
    });
    flush();
    if (rollout.tokens.length < rollout.num_tokens) {
      parent.append(element("span", { className: "omitted" }, ` … ${rollout.num_tokens - rollout.tokens.length} further tokens`));
    }
  }

  function facts(rollout) {
    const reward = rollout.reward === null ? "no reward" : `reward ${Number(rollout.reward.toPrecision(3))}`;
    const drafted = rollout.sources.filter((code) => code > 0).length;
    return element("header", { title: rollout.rollout_id },
      element("b", {}, reward), element("span", {}, `${rollout.num_tokens} tokens`), element("span", {}, rollout.finish_reason),
      element("span", {}, rollout.sources.length ? `${Math.round(100 * drafted / rollout.tokens.length)} % from drafts` : "no drafts"));
  }

  function card(rollout) {
    const header = facts(rollout), buttons = element("span", { className: "sides" });
    for (const side of ["A", "B"]) {
      const button = element("button", { type: "button", title: `Compare as ${side}` }, side);
      button.setAttribute("aria-pressed", String(compared[side] === rollout));
      button.addEventListener("click", () => { compared[side] = rollout; showColumns(); showComparison(); });
      buttons.append(button);
    }
    header.append(buttons);
    const text = element("pre");
    appendTokens(text, rollout);
    return element("article", { className: "rollout" }, header, text);
  }

  function showColumns() {
    const problem = problems[Number(problemSelect.value)];
    const all = [...new Set(problem.rollouts.map((one) => one.generation))];
    const first = Number(generationSelect.value);
    columns.replaceChildren(...all.slice(first, first + MAX_COLUMNS).map((generation) => {
      const rollouts = problem.rollouts.filter((one) => one.generation === generation);
      const title = `weight version ${rollouts[0].weight_version}` + (rollouts[0].weight_version === generation ? "" : `, generation ${generation}`);
      return element("div", { className: "column" }, element("h4", {}, title), element("div", { className: "cards" }, ...rollouts.map(card)));
    }));
  }

  function showComparison() {
    const { A, B } = compared;
    if (!A || !B) return comparison.replaceChildren();
    const different = tokenDiff(A.tokens, B.tokens);
    comparison.replaceChildren(...[A, B].map((rollout, index) => {
      const header = facts(rollout), text = element("pre");
      header.prepend(element("b", {}, `${"AB"[index]}: weight version ${rollout.weight_version}`));
      appendTokens(text, rollout, different[index]);
      return element("div", { className: "side" }, header, text);
    }));
  }

  // The end of the prompt, which usually is the question, says more than an id that is a hash.
  function label(problem) {
    const text = (problem.prompt ?? "").replace(/<\|[^|>]*\|>(user|system|assistant)?/g, " ").replace(/\s+/g, " ").trim();
    return text ? `${problem.problem_id.slice(0, 12)} · ${text.length > 50 ? `…${text.slice(-50)}` : text}` : problem.problem_id;
  }

  function showProblem() {
    const problem = problems[Number(problemSelect.value)];
    const all = [...new Set(problem.rollouts.map((one) => one.generation))];
    const starts = [];
    for (let start = Math.max(0, all.length - MAX_COLUMNS); ; start = Math.max(0, start - MAX_COLUMNS)) {
      starts.push(start);
      if (!start) break;
    }
    generationSelect.replaceChildren(...starts.map((start) => {
      const last = Math.min(all.length, start + MAX_COLUMNS) - 1;
      const version = (generation) => problem.rollouts.find((one) => one.generation === generation).weight_version;
      const [oldest, newest] = [version(all[start]), version(all[last])];
      return element("option", { value: start }, oldest === newest ? `${newest}` : `${oldest} to ${newest}`);
    }));
    prompt.hidden = problem.prompt === null;
    prompt.querySelector("pre").textContent = problem.prompt ?? "";
    const omitted = document.getElementById("omitted");
    omitted.hidden = !problem.num_omitted;
    omitted.textContent = `Older rollouts that are not in the report: ${problem.num_omitted}.`;
    const last = problem.rollouts.at(-1);
    compared = { A: problem.rollouts.find((one) => one.generation === all[Math.max(0, all.length - 2)]), B: last };
    showColumns();
    showComparison();
  }

  problemSelect.replaceChildren(...problems.map((problem, index) => element("option", { value: index, title: problem.problem_id }, label(problem))));
  problemSelect.addEventListener("change", showProblem);
  generationSelect.addEventListener("change", showColumns);
  document.getElementById("show-sources").addEventListener("change", (event) => {
    document.getElementById("rollouts").classList.toggle("plain", !event.target.checked);
  });
  showProblem();
})();
