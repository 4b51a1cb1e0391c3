// A hyphen in a search means "without this word", but our readers look for flags: --zero-stage becomes +zero +stage.
for (const kind of ["input", "keyup"]) {
  document.addEventListener(kind, ({ target }) => {
    if (!target.matches("[data-md-component=search-query]")) return
    const words = target.value
      .replace(/(^|\s)-+/g, "$1")
      .replace(/\+?\w+(-\w+)+/g, word => word.replace("+", "").split("-").map(part => `+${part}`).join(" "))
    if (words !== target.value) target.value = words
  }, true)
}
