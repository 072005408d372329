// Typeset the formulas of a page. Without scripts, their source is shown.
document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll(".formula"))
    katex.render(formula.textContent, formula, {displayMode: true, throwOnError: false});
});
